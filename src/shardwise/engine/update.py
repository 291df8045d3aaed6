"""The end of a step: controlled by the host, which reads loss and norm; or by the GPU alone.

If the host reads no number, it can launch the next step meanwhile:

    host      step 1 | step 2 | read 1 | step 3 | read 2 | ...       the numbers of a step are read one step later
    device      `---- step 1 ----'---- step 2 ----'---- step 3 ...    and the device is never idle

At the time of the update only the device knows whether loss and gradients are finite. So the device decides: from the
first non-finite step on it skips all updates, until the host has read that and calls `go_on`. The weights are then
those from before that step.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Adam

from shardwise.engine.drawn_steps import DrawnSteps
from shardwise.engine.parts import Parts
from shardwise.execution.step_losses import Tally
from shardwise.fusion.fuse import has_kernels
from shardwise.kernels.adamw import fused_adam
from shardwise.planner.plan import Offload
from shardwise.ranks.wires import OneProcess, Wires
from shardwise.states.data_parallel import DataParallel
from shardwise.torch_private import can_step_divided

#: The dtypes in which our kernel takes the steps of torch's fused Adam (`kernels/adamw.py`).
_HALVES = (torch.bfloat16, torch.float16)


class Update:
    """The end of a step: scale gradients to the mean over the whole batch, check and clip them, and step.

    With clipping, `gradient_norm` is the norm of the whole batch's gradient before it was clipped. A step whose loss or
    norm is not finite leaves the weights unchanged and sets `was_finite` to False. `divides_on` is the device on which
    optimizers scale gradients themselves, in the same pass in which they read them.
    """

    def __init__(
        self, data: DataParallel, wires: Wires, clip: float | None, *, divides_on: torch.device | None = None
    ) -> None:
        self._data, self._wires, self._clip, self._divides_on = data, wires, clip, divides_on
        self._drawn = DrawnSteps(data.updates.optimizers, wires)
        self.gradient_norm: float | None = None
        self.was_finite = True
        #: Called with loss and norm before weights change: whether to hold the step back. The same on all ranks.
        self.holds: Callable[[float, float | None], bool] | None = None
        self.was_held = False

    def take(self, tally: Tally) -> None:
        """Step with the gradients that were summed last."""
        self.was_finite = math.isfinite(tally.mean)  # A batch without a mean raises here.
        scale = 1 / tally.count
        if self._clip is not None:
            self._wires.stand("the norm of the gradients")
            square = self._data.square().cpu()
            self._wires.sum(square, "the norm of the gradients")
            self.gradient_norm = float(square) ** 0.5 * scale
            self.was_finite = self.was_finite and math.isfinite(self.gradient_norm)
            scale *= min(1.0, self._clip / (self.gradient_norm + 1e-6))
        self.was_held = self.holds is not None and self.holds(tally.mean, self.gradient_norm)
        if self.was_held:
            return
        self._drawn.check()
        if self.was_finite and self._divides_on is not None and scale != 1.0:
            divisor, never = (
                torch.full((), 1 / scale, device=self._divides_on),
                torch.zeros((), device=self._divides_on),
            )
            self._data.step_divided(divisor, never)
        elif self.was_finite:
            self._data.step(scale)


class StepNumbers(NamedTuple):
    """The numbers of a step. A step that was not finite has left the weights unchanged."""

    loss: float
    gradient_norm: float | None
    was_finite: bool


class LaunchedStep:
    """A step launched on the device. `read` waits for it."""

    def __init__(self, found: StepNumbers | Tensor, event: torch.cuda.Event | None = None) -> None:
        self._found, self._event = found, event

    @property
    def was_deferred(self) -> bool:
        """Whether the device decided by itself whether to update."""
        return isinstance(self._found, Tensor)

    @property
    def is_over(self) -> bool:
        """Whether its numbers can be read without waiting."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> StepNumbers:
        """Wait for the step and return its numbers."""
        if isinstance(self._found, StepNumbers):
            return self._found
        if self._event is not None:
            self._event.synchronize()
        loss, is_left_out, *norm = self._found.tolist()
        return StepNumbers(loss, norm[0] if norm else None, not is_left_out)


class DeviceUpdate:
    """The end of a step by the device alone: scale, check and clip gradients, and step, without reading a number."""

    def __init__(self, data: DataParallel, clip: float | None, device: torch.device) -> None:
        self._data, self._clip, self._device = data, clip, device
        #: 1 after a step that was not finite, until `go_on`; else 0.
        self._leaves_out = torch.zeros((), device=device)
        self._launched: LaunchedStep | None = None

    @property
    def launched(self) -> LaunchedStep:
        """The last step."""
        assert self._launched is not None, "no step has been launched"
        return self._launched

    @torch.no_grad()
    def take(self, tally: Tally) -> None:
        """Step with the gradients that were summed last."""
        total, count = tally.on_device(self._device)
        found, divisor = [total / count], count
        if self._clip is not None:
            norm = self._data.square().sqrt() / count
            found.append(norm)
            divisor = count * ((norm + 1e-6) / self._clip).clamp(min=1.0)
        is_wrong = ~torch.isfinite(torch.stack(found)).all()
        self._leaves_out = torch.maximum(self._leaves_out, is_wrong.float())
        self._data.step_divided(divisor.float(), self._leaves_out)
        numbers = torch.stack([found[0], self._leaves_out.double(), *found[1:]])
        if self._device.type != "cuda":
            self._launched = LaunchedStep(numbers)
            return
        told = torch.empty(len(numbers), dtype=torch.float64, pin_memory=True)
        told.copy_(numbers, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._launched = LaunchedStep(told, event)

    def go_on(self) -> None:
        """Resume updates: the host has read that a step was not finite."""
        self._leaves_out.zero_()


def find_device_update(parts: Parts, data: DataParallel) -> DeviceUpdate | None:
    """Return a `DeviceUpdate` if the rank is alone, with all state on its device and capable optimizers; else None."""
    clip = parts.options.clip
    # An infinite `clip` clips nothing: the caller wants the norm of every step at once, so the update must wait.
    is_known = clip is None or math.isfinite(clip)
    return DeviceUpdate(data, clip, parts.device) if is_known and can_divide(parts, data) else None


def can_divide(parts: Parts, data: DataParallel) -> bool:
    """Whether the rank is alone, has all state on its device, and optimizers that divide gradients themselves."""
    optimizers = data.updates.optimizers
    is_here = data.sharing.local and parts.plan.offload == Offload() and not parts.schedule.staleness
    can = bool(optimizers) and all(map(can_step_divided, optimizers))
    return isinstance(parts.wires, OneProcess) and is_here and can


def use_kernels(parts: Parts, data: DataParallel) -> None:
    """Step with our kernel where optimizers are torch's fused Adam or AdamW, on weights in 16 bits."""
    if not (parts.options.kernels and has_kernels([parts.device]) and parts.plan.offload == Offload()):
        return
    found = {
        each.name: "step of fused Adam"
        for each in data.updates.updated
        if isinstance(each.optimizer, Adam) and can_step_divided(each.optimizer) and each.weight.dtype in _HALVES
    }
    if found:
        data.updates.stepping = partial(fused_adam, _HALVES)
        parts.fused.replaced |= found
