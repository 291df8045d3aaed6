"""Track through glue where the values of a tensor come from, from unit to unit.

Every tensor that glue creates carries the sources that it was computed from. What a unit returns is a new source: the
unit's own inputs are not followed through it.
"""

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.torch_private import is_wrapped, storage_id

#: The storage id of tensors without a storage.
NO_STORAGE = -1


class Made(NamedTuple):
    """What a call of a unit returned: the index of the call in the run, and the index of the leaf."""

    call: int
    leaf: int


class HeldTensor(NamedTuple):
    """A parameter or a buffer, by its name."""

    name: str


class Hidden(NamedTuple):
    """A value computed inside a call that left it other than by being returned."""

    call: int


class Drawn(NamedTuple):
    """A random number drawn in glue, identified by the source line."""

    where: str


Source = Made | HeldTensor | Hidden | Drawn
Sources = frozenset[Source]
NOTHING: Sources = frozenset()


class Ledger:
    """The sources of every live tensor."""

    def __init__(self, module: nn.Module) -> None:
        self._sources = WeakTensorKeyDictionary()
        #: The storages of what units returned. The weak reference keeps a storage's id from being reused.
        self._homes: dict[int, tuple[StorageWeakRef, Made]] = {}
        for name, each in chain(module.named_buffers(), module.named_parameters()):
            self._sources[each] = frozenset([HeldTensor(name)])

    def of(self, tensor: Tensor) -> Sources:
        found: Sources = self._sources.get(tensor, NOTHING)  # type: ignore[no-untyped-call]
        return found

    def of_all(self, tensors: Iterable[Tensor]) -> Sources:
        return NOTHING.union(*(self.of(tensor) for tensor in tensors))

    def made_and_alive(self) -> Sources:
        """Return the outputs of units that any live tensor was computed from."""
        return frozenset(made for each in list(self._sources) for made in self.of(each) if isinstance(made, Made))

    def set(self, tensor: Tensor, sources: Sources) -> None:
        self._sources[tensor] = sources

    def set_made(self, tensor: Tensor, made: Made) -> None:
        """Record that a unit returned this tensor."""
        self._sources[tensor] = frozenset([made])
        if storage_of(tensor) != NO_STORAGE:
            reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._homes[storage_of(tensor)] = reference, made

    def write(self, written: Tensor, sources: Sources) -> Made | None:
        """Record a write to a tensor: all tensors that share its storage get these sources too.

        Return the output of a unit that is now overwritten, if the storage held one.
        """
        place = storage_of(written)
        sharing = [each for each in self._sources if storage_of(each) == place]
        for each in [*sharing, written]:
            self._sources[each] = self.of(each) | sources
        return self._homes[place][1] if place in self._homes else None


def storage_of(tensor: Tensor) -> int:
    """Return an id of the tensor's storage."""
    if tensor.layout is not torch.strided or is_wrapped(tensor):
        return NO_STORAGE
    return storage_id(tensor.untyped_storage())
