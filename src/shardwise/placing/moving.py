"""Layer by layer, as written: each unit's weights are on its place, and what it is called with is moved there.

The module's own forward is run from top to bottom by the caller. A hook in front of each unit moves its arguments, and
what the module returns goes back to where its inputs were. That is all.
"""

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.placing.device_moves import CrossDeviceMode, moved
from shardwise.stages.split.outline import leaves_of, open_dataclasses
from shardwise.torch_private import buffer_slots


def settle(module: nn.Module, where: Mapping[str, torch.device]) -> None:
    """Move every parameter and buffer, by its first name, to its device. They stay the same objects to an optimizer."""
    with torch.inference_mode(False), torch.no_grad():  # What moves in an inference may be trained later.
        for name, parameter in module.named_parameters():
            if parameter.device != where[name]:
                parameter.data = parameter.data.to(where[name])
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.to(where[name])
        first_names = {id(buffer): name for name, buffer in module.named_buffers()}
        for each in module.modules():
            for key, buffer in each.named_buffers(recurse=False):
                buffer_slots(each)[key] = buffer.to(where[first_names[id(buffer)]])


class InputMover:
    """Hooks on a module and its units, where there is more than one device. `remove` takes them away.

    In the threads of a pipeline all is where it is needed, and nothing is done here.
    """

    def __init__(self, module: nn.Module, units: Mapping[str, torch.device]) -> None:
        self._now = threading.local()
        self._hooks = [module.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)]
        self._hooks.append(module.register_forward_hook(self._end, always_call=True))
        for name, device in units.items():
            unit = module.get_submodule(name)
            self._hooks.append(unit.register_forward_pre_hook(_Move(self, device), with_kwargs=True))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def come_to(self, device: torch.device) -> None:
        """A unit is about to be run on a device: what meets after it, outside of units, meets there."""
        meeting: CrossDeviceMode | None = getattr(self._now, "meeting", None)
        if meeting is not None:
            meeting.device = device

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if CrossDeviceMode.is_open():
            return
        tensors = [each for each in leaves_of((args, kwargs)) if isinstance(each, Tensor)]
        self._now.home = tensors[0].device if tensors else None
        self._now.meeting = CrossDeviceMode(self._now.home or torch.device("cpu")).__enter__()

    def _end(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        meeting: CrossDeviceMode | None = getattr(self._now, "meeting", None)
        if meeting is None:
            return output
        self._now.meeting = None
        meeting.__exit__(None, None, None)
        open_dataclasses(output)
        return output if self._now.home is None else moved(output, self._now.home)


class _Move:
    """In front of one unit: its arguments go where it is."""

    def __init__(self, mover: InputMover, device: torch.device) -> None:
        self._mover, self._device = mover, device

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        self._mover.come_to(self._device)
        found: tuple[Any, Any] = moved((args, kwargs), self._device)
        return found
