"""How a run ends: with an outcome, or stopped for a reason that all ranks know."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.trace.events import Trace


class StoppedError(ShardwiseError):
    """A run cannot continue, for a reason that all ranks know. It is reported once, without tracebacks.

    `is_final`: resumed from its checkpoint, it would end the same way. `hosts` are to be excluded from the next start.
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
    """The result of a finished run, in plain values. `sample` is the prompt and then the model's text.

    `tokens_per_second` and `mfu` exclude the first step, which allocates memory and selects and compiles kernels. They
    are None if no step was left to do. `memory_bytes` is the peak of the fullest rank. If the run stopped in order to
    continue on other hosts, `leave_out` are those to exclude, and `take_in` those to add.
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
    """The outcome of a run, as the first rank reports it. `cut` describes how the module was split."""

    result: Result
    model: Mapping[str, Any]
    data: Mapping[str, Any]
    trace: Trace | None
    cut: Mapping[str, Any]
