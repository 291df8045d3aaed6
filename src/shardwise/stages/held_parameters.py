"""What a module holds in the places of its parameters, while it is called: a second forward has to find the same.

`torch.func.functional_call` puts other tensors there for one call (fast weights, ensembles), and a forward may have
parameters rest for a call (`requires_grad_(False)`, as where one module has both sides of a GAN). Both are undone when
the backward computes the module again.
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
    """One of the places, what is there, and whether it requires a gradient."""

    slot: _Slot
    tensor: Tensor
    requires_grad: bool


class Held:
    """The places of one module, looked for when it is first called."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []

    def now(self, module: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """A context in which the module holds what it holds now."""
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
