"""What a rank does that is to fail: it trains two steps, and in the third something happens to one of them."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwise.engine.parallelize import parallelize
from shardwise.parity.problem import CLIP, make_optimizer
from shardwise.planner.plan import Plan
from shardwise.ranks.faults import Watch
from shardwise.ranks.rank_error import RankError
from shardwise.ranks.wires import make_wires
from shardwise.ranks.worker import join_if_launched
from shardwise.schedule.instruction import Instruction, Kind
from tests.parity.models import make_problem

#: What may happen: in the middle of a step, or before it ("absent": the rank never comes to a collective).
FAULTS = ("kill", "stop", "raise", "late", "absent")
#: After so many whole steps: all that a step needs has been loaded by then.
WHOLE_STEPS = 2
_BACKWARDS = (Kind.B, Kind.I)


def train_and_fail(plan: Plan, fault: str, victim: int, limit_seconds: float, folder: Path) -> None:
    """Write down who this process is, when the fault happened, and what it was told of it and when."""
    join_if_launched()
    rank = dist.get_rank()
    (folder / f"process{rank}").write_text(str(os.getpid()))
    problem = make_problem("tied", plan)()
    wires = make_wires(plan, limit_seconds=limit_seconds)
    engine = parallelize(
        problem.module, plan, loss=problem.loss, optimizer=make_optimizer, example=problem.batches[0], clip=CLIP,
        wires=wires,
    )  # fmt: skip
    for number in range(WHOLE_STEPS):
        engine.train_step(problem.batches[number])
    (folder / f"ready{rank}").touch()
    assert isinstance(wires.watch, Watch)
    if rank == victim and fault == "absent":
        _happen("late", folder)
    if rank == victim:
        _arm(wires.watch, fault, folder)
    try:
        for _ in range(100):
            engine.train_step(problem.batches[WHOLE_STEPS])
    except RankError as error:
        told = folder / f"told{rank}"
        told.write_text(f"{time.monotonic()}\n{error.rank}\n{error.problem}")
        raise


def _arm(watch: Watch, fault: str, folder: Path) -> None:
    """Let it happen at the first backward."""
    before = watch.at

    def at(place: Any) -> None:
        if isinstance(place, Instruction) and any(part.kind in _BACKWARDS for part in place.parts):
            _happen(fault, folder)
        before(place)

    watch.at = at  # type: ignore[method-assign]


def _happen(fault: str, folder: Path) -> None:
    (folder / "happened").write_text(str(time.monotonic()))
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "raise":
        raise ValueError("boom")
    else:
        time.sleep(600)


if __name__ == "__main__":
    import sys

    _plan, _fault, _victim, _limit, _folder = sys.argv[1:]
    train_and_fail(Plan.parse(_plan), _fault, int(_victim), float(_limit), Path(_folder))
