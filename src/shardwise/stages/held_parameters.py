"""The tensors in a module's parameter slots during a call: a recomputed forward has to find the same ones.

`torch.func.functional_call` puts other tensors there for one call (fast weights, ensembles). A forward may also freeze
parameters for a call (`requires_grad_(False)`, for example if one module holds both sides of a GAN). Both are undone by
the time that the backward computes the module again.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardwise.torch_private import parameter_slots

#: The dictionary that has a parameter, and its key there.
_Slot = tuple[dict[str, Any], str]


class _Place(NamedTuple):
    """One parameter slot, the tensor in it, and whether that requires a gradient."""

    slot: _Slot
    tensor: Tensor
    requires_grad: bool


class Held:
    """The parameter slots of one module, found when it is first called."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []

    def now(self, module: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """Return a context in which the module holds the tensors that it holds now."""
        if not self._slots:
            every = [parameter_slots(each) for each in module.modules()]
            self._slots = [(slots, key) for slots in every for key in slots]
        then = [
            _Place((slots, key), each, each.requires_grad)
            for slots, key in self._slots
            if (each := slots.get(key)) is not None
        ]
        return partial(_held, then)


@contextmanager
def _held(then: list[_Place]) -> Iterator[None]:
    places = [
        each
        for each in then
        if each.slot[0].get(each.slot[1]) is not each.tensor or each.tensor.requires_grad != each.requires_grad
    ]
    found = [(slots, key, slots.get(key)) for (slots, key), _, _ in places]
    flags = [(tensor, tensor.requires_grad) for _, tensor, _ in places if tensor.is_leaf]
    for (slots, key), tensor, requires_grad in places:
        slots[key] = tensor
        if tensor.is_leaf:
            tensor.requires_grad_(requires_grad)
    try:
        yield
    finally:
        for slots, key, newest in found:
            slots[key] = newest
        for each, requires_grad in flags:
            each.requires_grad_(requires_grad)
