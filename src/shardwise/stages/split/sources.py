"""Where the numbers in a tensor came from, followed through glue from unit to unit.

Every tensor that glue makes carries the sources that it was computed from. What a unit returns is a source itself: what
it was computed from in turn is that unit's business.
"""

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.torch_private import is_wrapped, storage_id

#: Of tensors that lie in no memory of their own.
NO_STORAGE = -1


class Made(NamedTuple):
    """What a call of a unit returned: the index of the call in the run, and the index of the leaf."""

    call: int
    leaf: int


class HeldTensor(NamedTuple):
    """A parameter or a buffer, by its name."""

    name: str


class Hidden(NamedTuple):
    """Something from inside a call that got out otherwise than by being returned."""

    call: int


class Drawn(NamedTuple):
    """A random number drawn in glue, by the line of source that draws it."""

    where: str


Source = Made | HeldTensor | Hidden | Drawn
Sources = frozenset[Source]
NOTHING: Sources = frozenset()


class Ledger:
    """The sources of every tensor that is alive."""

    def __init__(self, module: nn.Module) -> None:
        self._sources = WeakTensorKeyDictionary()
        #: The memory of what units returned. A weak reference keeps its number from being given to another.
        self._homes: dict[int, tuple[StorageWeakRef, Made]] = {}
        for name, each in chain(module.named_buffers(), module.named_parameters()):
            self._sources[each] = frozenset([HeldTensor(name)])

    def of(self, tensor: Tensor) -> Sources:
        found: Sources = self._sources.get(tensor, NOTHING)  # type: ignore[no-untyped-call]
        return found

    def of_all(self, tensors: Iterable[Tensor]) -> Sources:
        return NOTHING.union(*(self.of(tensor) for tensor in tensors))

    def made_and_alive(self) -> Sources:
        """What units have returned that some tensor which is there was computed from."""
        return frozenset(made for each in list(self._sources) for made in self.of(each) if isinstance(made, Made))

    def set(self, tensor: Tensor, sources: Sources) -> None:
        self._sources[tensor] = sources

    def set_made(self, tensor: Tensor, made: Made) -> None:
        """A unit returned this tensor."""
        self._sources[tensor] = frozenset([made])
        if storage_of(tensor) != NO_STORAGE:
            reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._homes[storage_of(tensor)] = reference, made

    def write(self, written: Tensor, sources: Sources) -> Made | None:
        """Something was written into a tensor: all that share its memory have these sources too.

        Returns what a unit had returned and is now overwritten, if that is what lay there.
        """
        place = storage_of(written)
        sharing = [each for each in self._sources if storage_of(each) == place]
        for each in [*sharing, written]:
            self._sources[each] = self.of(each) | sources
        return self._homes[place][1] if place in self._homes else None


def storage_of(tensor: Tensor) -> int:
    """What identifies the memory that a tensor lies in."""
    if tensor.layout is not torch.strided or is_wrapped(tensor):
        return NO_STORAGE
    return storage_id(tensor.untyped_storage())
