"""Operations on tensors of several devices: values are brought to one, and a copy of a shared weight stands for it.

A weight that several stages use is one parameter, of the first of them. The others have a copy of it for one pass,
or the same memory if they are on the same device, each with a gradient of its own. When all have finished, these are
added to the owner's, in the order of the stages, so that the sum never depends on who was first.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.stages.split.outline import leaves_of
from shardwise.states.tiers.streamed_gradients import give
from shardwise.torch_private import pytree


def moved(given: Any, device: torch.device) -> Any:
    """The same, with every tensor in it on a device. What is inside of other objects, like caches, stays."""
    leaves = leaves_of(given)
    if all(each.device == device for each in leaves if isinstance(each, Tensor)):
        return given
    return pytree.tree_map(lambda each: each.to(device) if isinstance(each, Tensor) else each, given)


class CrossDeviceMode(TorchFunctionMode):
    """Operations on tensors of several devices happen on `device`, and with copies in place of shared weights."""

    _opened = threading.local()

    def __init__(self, device: torch.device, copies: Mapping[Tensor, Tensor] | None = None) -> None:
        super().__init__()
        self.device = device
        self._copies = {id(owner): each for owner, each in (copies or {}).items()}

    @classmethod
    def is_open(cls) -> bool:
        """Whether this thread is inside of one."""
        return getattr(cls._opened, "count", 0) > 0

    def __enter__(self) -> "CrossDeviceMode":
        self._opened.count = getattr(self._opened, "count", 0) + 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.count -= 1
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        tensors = [each for each in leaves_of((args, kwargs)) if isinstance(each, Tensor)]
        if self._copies and any(id(each) in self._copies for each in tensors):
            args, kwargs = pytree.tree_map(lambda each: self._copies.get(id(each), each), (args, kwargs))
        # Numbers without dims may be on the CPU everywhere.
        if len({each.device for each in tensors if each.dim()}) > 1:
            args, kwargs = moved((args, kwargs), self.device)
        return func(*args, **kwargs)


def copies_for(parameters: Sequence[nn.Parameter], device: torch.device) -> dict[Tensor, Tensor]:
    """For each parameter what stands for it on a device during one pass."""
    wants = torch.is_grad_enabled()
    return {each: each.detach().to(device).requires_grad_(wants and each.requires_grad) for each in parameters}


def add_gradients(copies: Mapping[Tensor, Tensor]) -> None:
    """Add the gradients of copies to their owners'."""
    with torch.no_grad():
        for owner, each in copies.items():
            if each.grad is not None:
                give(owner, each.grad.to(owner.device))
                each.grad = None
