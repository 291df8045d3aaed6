"""Timed devices: stages whose compute is a wait, so that the real executor runs many ranks on few cores.

A stage is one node of autograd, with its waits in front of the two leaves, so that an I waits for the input gradient
alone, a W for the weight gradient alone, and a B for each of them once:

      output
        |
      [add] --- waits for W --- weight
        |
     waits for I
        |
      input

Its durations are those of a device: forward from call to return, backward from the arrival of a gradient.

The first stage has no input that needs a gradient. There, as for any model (`execution/backward.py`), the wait for I is
part of its W: `first_stage_waits_in_weights` tells the simulator.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.schedule.instruction import Instruction, Kind
from shardwise.schedule.prices import Prices
from shardwise.stages.stage import Batch, Split, Stage, Values
from shardwise.torch_private import gradient_hooks

_SET_TIMER_SLACK = 29  # Of prctl(2).

#: Lets time pass; gets the seconds and their purpose: `F`, `I` or `W`.
Wait = Callable[[float, Kind], None]


class Seconds(NamedTuple):
    """The durations of one stage for one microbatch."""

    forward: float
    input_gradient: float
    weight_gradient: float

    def times(self, factor: float) -> "Seconds":
        """Return the durations of a part of the stage, or on a slower device."""
        return Seconds(*(factor * each for each in self))


def sleep(seconds: float, kind: Kind) -> None:  # noqa: ARG001 - all waits are alike
    """Let time pass without using the CPU, except at the end: a sleep alone ends slightly late."""
    if seconds <= 0:
        return
    end = time.perf_counter() + seconds
    early = _wake_early(threading.get_ident())
    if seconds > early:
        time.sleep(seconds - early)
    while time.perf_counter() < end:
        pass


@cache
def _wake_early(thread: int) -> float:  # noqa: ARG001 - each is asked for by itself
    """Return how much earlier a sleep of this thread has to end so that it is not late.

    By default Linux may end sleeps 50 microseconds late, to end several at once; this asks it not to.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    is_exact = prctl is not None and prctl(_SET_TIMER_SLACK, ctypes.c_ulong(1), 0, 0, 0) == 0
    return 25e-6 if is_exact else 1e-4


def spin(seconds: float, kind: Kind) -> None:  # noqa: ARG001 - all waits are alike
    """Let time pass and keep the CPU busy, as a computing rank does: one that slept has cold caches."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class TimedModule(nn.Module):
    """A stage as a module: maps a tensor of `width` elements to another. The first stage starts with a parameter."""

    def __init__(self, seconds: Seconds, *, is_first: bool, width: int = 8, wait: Wait = sleep) -> None:
        super().__init__()
        self.seconds, self.wait = seconds, wait
        self._busy_until = 0.0
        self.weight = nn.Parameter(torch.zeros(1, width))
        self.weight.register_hook(self._wait_for_weights)  # type: ignore[no-untyped-call]
        self.begin = nn.Parameter(torch.zeros(1, width)) if is_first else None

    def forward(self, value: Tensor) -> Tensor:
        start = time.perf_counter()
        if self.begin is not None:
            value = value + self.begin
        # A receive buffer that is reused has its hook since the first time.
        if value.requires_grad and not gradient_hooks(value):
            value.register_hook(self._wait_for_inputs)  # type: ignore[no-untyped-call]
        output: Tensor = value + self.weight
        if output.requires_grad:
            output.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]
        self.wait(start + self.seconds.forward - time.perf_counter(), Kind.F)
        return output

    def _begin_backward(self, gradient: Tensor) -> None:  # noqa: ARG002 - what a hook is given
        self._busy_until = time.perf_counter()

    def _wait_for_inputs(self, gradient: Tensor) -> None:  # noqa: ARG002
        self._be_busy(self.seconds.input_gradient, Kind.I)

    def _wait_for_weights(self, gradient: Tensor) -> None:  # noqa: ARG002
        self._be_busy(self.seconds.weight_gradient, Kind.W)

    def _be_busy(self, seconds: float, kind: Kind) -> None:
        """Wait for the end of what began when a gradient reached this stage, or when what came before it ended."""
        self._busy_until += seconds
        self.wait(self._busy_until - time.perf_counter(), kind)


@dataclass(slots=True, kw_only=True)
class TimedStage:
    """A timed module as an executor sees it. The first stage reads the batch's `value`."""

    module: TimedModule
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    reads: str | None
    writes: str | None

    def run(self, values: Values, batch: Batch) -> tuple[Values, Any]:
        made = self.module.forward(batch["value"] if self.reads is None else values[self.reads])
        return ({}, made) if self.writes is None else ({self.writes: made}, None)


def timed_split(seconds: Sequence[Seconds], *, wait: Wait = sleep) -> Split:
    """Return a chain of timed stages, one for each entry."""
    last = len(seconds) - 1
    names = [f"value{number}" for number in range(last)]
    stages: list[Stage] = []
    for number, each in enumerate(seconds):
        module = TimedModule(each, is_first=number == 0, wait=wait)
        stages.append(
            TimedStage(
                module=module,
                parameters={f"stage{number}.{name}": each for name, each in module.named_parameters()},
                buffers={},
                reads=names[number - 1] if number else None,
                writes=names[number] if number < last else None,
            )
        )
    return Split(
        stages=tuple(stages),
        reads=((), *((name,) for name in names)),
        writes=(*((name,) for name in names), ()),
        makers={name: number for number, name in enumerate(names)},
        ties={},
        units=tuple((f"stage{number}",) for number in range(len(seconds))),
    )


def timed_batch(num_microbatches: int, width: int = 8) -> list[Batch]:
    """Microbatches for timed stages: one row each."""
    return [{"value": torch.zeros(1, width)} for _ in range(num_microbatches)]


def square_of(output: Tensor, batch: Batch | None = None) -> Tensor:  # noqa: ARG001 - labels are for real models
    """Return a loss whose gradient is a contiguous tensor: torch does not send expanded ones."""
    return output.square().sum()


def first_stage_waits_in_weights(prices: Prices, num_stages: int) -> Prices:
    """Return the prices as timed stages pay them: the first stage of a model has no I of its own."""

    def seconds(instruction: Instruction, rank: int) -> float:
        total = 0.0
        for part in instruction.parts:
            if part.stage % num_stages or part.kind not in (Kind.I, Kind.W):
                total += prices.seconds(part, rank)
            elif part.kind is Kind.W:
                total += prices.seconds(part, rank) + prices.seconds(part._replace(kind=Kind.I), rank)
        return total

    return replace(prices, seconds=seconds)
