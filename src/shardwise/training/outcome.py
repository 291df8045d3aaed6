"""How a run ends: with an outcome, or stopped for a reason that all ranks know."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.trace.events import Trace


class StoppedError(ShardwiseError):
    """A run cannot go on, for a reason that all ranks know: it is told once, without their tracebacks.

    `is_final`: from its checkpoint it would end so again. `hosts` are those that it should do without.
    """

    def __init__(
        self, problem: str, *, remedy: str | None = None, is_final: bool = True, hosts: tuple[str, ...] = ()
    ) -> None:
        super().__init__(problem, remedy=remedy)
        self.is_final, self.hosts = is_final, hosts

    def __reduce__(self) -> tuple[object, ...]:
        return partial(StoppedError, remedy=self.remedy, is_final=self.is_final, hosts=self.hosts), (self.problem,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A run that is over, in plain values. `sample` has the prompt before what the model wrote.

    `tokens_per_second` and `mfu` are of the steps after the first, in which memory is allocated and kernels are chosen
    and compiled; there are none where no step was left to do. `memory_bytes` is the most that a rank has held.
    `leave_out` are hosts that it has stopped for, to go on without them; `take_in` those to go on with.
    """

    run: str
    step: int
    loss: float | None
    held_out_loss: float | None
    seconds: float
    tokens_per_second: float | None
    num_parameters: int
    plan: str
    checkpoint: str | None
    mfu: float | None = None
    memory_bytes: float | None = None
    precision: str = "fp32"
    compiled: bool = False
    expert_imbalance: float | None = None
    stopped_by: str | None = None
    leave_out: tuple[str, ...] = ()
    take_in: tuple[str, ...] = ()
    sample: str | None = None
    report: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a run, as its first rank tells it. `cut` is how the model was cut."""

    result: Result
    model: Mapping[str, Any]
    data: Mapping[str, Any]
    trace: Trace | None
    cut: Mapping[str, Any]
