"""Real steps of the real runtime with a fault in them: what ranks do, and the run that the doctor is shown.

A layer takes a known time beyond its computing, so that what is wrong stands out on a machine that has other things to
do too.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import AdamW

from shardwise.engine.parallelize import parallelize
from shardwise.nets.initialise import initialise
from shardwise.nets.transformer import Transformer
from shardwise.planner.plan import Plan
from shardwise.states.parameter_group import Share
from shardwise.trace.events import Trace
from shardwise.trace.run import Choice, Run
from shardwise.training.data.rows import Batch, Batches
from shardwise.training.job import Job
from shardwise.training.profile import Measured, measure_rank
from tests.trace.steps import SETTINGS, a_batch, summed


@dataclass(frozen=True, kw_only=True)
class Patient:
    """A plan and what is wrong: `slow` are seconds more of each layer by rank, `stall` a rank and one long sleep."""

    plan: str
    layer_seconds: float = 0.006
    slow: dict[int, float] = field(default_factory=dict)
    stall: tuple[int, float] | None = None
    optimizer_seconds: float = 0.0
    bucket_bytes: int | None = None


def examined_step(patient: Patient) -> tuple[Trace, tuple[int, ...]]:
    """What every rank does: a few steps, the last of them traced. With it go the units of each stage."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    module = Transformer(SETTINGS)
    initialise(module, seed=5)
    naps = _Naps(patient.layer_seconds + patient.slow.get(rank, 0.0))
    for layer in module.layers:
        layer.register_forward_pre_hook(naps)

    class Slow(AdamW):
        def step(self, closure: Any = None) -> Any:
            time.sleep(patient.optimizer_seconds)
            return super().step(closure)

    engine = parallelize(
        module,
        patient.plan,
        loss=summed,
        optimizer=[Share(make=lambda parameters: Slow(parameters, lr=1e-3), whole=False)],
        example=a_batch(0),
        clip=1.0,
        bucket_bytes=patient.bucket_bytes,
    )
    with engine:
        engine.train_step(a_batch(1))
        if patient.stall is not None and patient.stall[0] == rank:
            naps.once = patient.stall[1]
        engine.train_step(a_batch(2), trace=True)
        trace, layers = engine.trace, tuple(map(len, engine.split.units))
    assert trace is not None, "it was recorded"
    return trace, layers


class _Naps:
    """Sleeps at every call; at the third from now for longer, if that is wanted."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self.once, self._calls = seconds, 0.0, 0

    def __call__(self, *_: Any) -> None:
        self._calls += bool(self.once)
        time.sleep(self._seconds + (self.once if self._calls == 3 else 0.0))


def slowly_fed(job: Job, seconds: float) -> Measured | None:
    """A profile of a run whose batches take so long to be read."""
    at = Batches.at

    def slowly(batches: Batches, step: int) -> Batch:
        time.sleep(seconds)
        return at(batches, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batches, "at", slowly)
        return measure_rank(job, 1)


def run_of(patient: Patient, trace: Trace, layers: tuple[int, ...]) -> Run:
    """What the doctor is shown."""
    plan = Plan.parse(patient.plan)
    chosen = {key: str(getattr(plan, key)) for key in ("dp", "pp", "tp", "cp", "ep", "zero")}
    return Run(
        name="real",
        trace=trace,
        plan=tuple(Choice(key=key, value=value) for key, value in chosen.items()),
        facts={"layers": "+".join(map(str, layers))},
        memory_bytes=80 * 2.0**30,
    )
