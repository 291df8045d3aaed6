"""Layer by layer, in the order of the module's forward: each unit's weights are on its place; its inputs move there.

The caller runs the module's own forward from top to bottom. A pre-forward hook of each unit moves its arguments, and
the module's outputs are moved back to the device of its inputs. Between units, a torch function mode moves operands to
one device.
"""

import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.stages.split.outline import leaves_of, open_dataclasses
from shardwise.torch_private import buffer_slots, pytree


def settle(module: nn.Module, where: Mapping[str, torch.device]) -> None:
    """Move every parameter and buffer, by its first name, to its device. They stay the same objects to an optimizer."""
    with torch.inference_mode(False), torch.no_grad():  # A module moved in inference mode may be trained later.
        for name, parameter in module.named_parameters():
            if parameter.device != where[name]:
                parameter.data = parameter.data.to(where[name])
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.to(where[name])
        first_names = {id(buffer): name for name, buffer in module.named_buffers()}
        for each in module.modules():
            for key, buffer in each.named_buffers(recurse=False):
                buffer_slots(each)[key] = buffer.to(where[first_names[id(buffer)]])


def moved(given: Any, device: torch.device) -> Any:
    """Return the same value with every tensor in it on a device. Tensors inside other objects, like caches, stay."""
    leaves = leaves_of(given)
    if all(each.device == device for each in leaves if isinstance(each, Tensor)):
        return given
    return pytree.tree_map(lambda each: each.to(device) if isinstance(each, Tensor) else each, given)


class CrossDeviceMode(TorchFunctionMode):
    """Runs operations on tensors of several devices on `device`, with copies in place of shared weights."""

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


class InputMover:
    """Hooks on a module and its units, if there is more than one device. `remove` removes them.

    In the threads of a pipeline all is where it is needed, and nothing is done here.
    """

    def __init__(self, module: nn.Module, units: Mapping[str, torch.device]) -> None:
        self._now = threading.local()
        self._hooks = [module.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)]
        self._hooks.append(module.register_forward_hook(self._end, always_call=True))
        for name, device in units.items():
            unit = module.get_submodule(name)
            self._hooks.append(unit.register_forward_pre_hook(partial(self._come_to, device), with_kwargs=True))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _come_to(
        self, device: torch.device, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Move a unit's arguments to its device, where its outputs also meet other tensors outside units."""
        mode: CrossDeviceMode | None = getattr(self._now, "mode", None)
        if mode is not None:
            mode.device = device
        found: tuple[Any, Any] = moved((args, kwargs), device)
        return found

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if CrossDeviceMode.is_open():
            return
        tensors = [each for each in leaves_of((args, kwargs)) if isinstance(each, Tensor)]
        self._now.home = tensors[0].device if tensors else None
        self._now.mode = CrossDeviceMode(self._now.home or torch.device("cpu")).__enter__()

    def _end(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        mode: CrossDeviceMode | None = getattr(self._now, "mode", None)
        if mode is None:
            return output
        self._now.mode = None
        mode.__exit__(None, None, None)
        open_dataclasses(output)
        return output if self._now.home is None else moved(output, self._now.home)
