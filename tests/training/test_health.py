"""Ranks that are really slowed down are named with their cause, and no rank is named in an even run."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardwise.nets.block import Block
from shardwise.ranks.spawn import Ranks
from shardwise.trace.journal import read_journal
from shardwise.training.data.rows import Batch, Prefetcher
from shardwise.training.job import Job
from shardwise.training.run import train_rank
from tests.training.programs import make_job

#: Stops a process for most of the time, for as long as there is one.
_STOPPED = "while kill -STOP $0 2>/dev/null; do sleep 0.2; kill -CONT $0; sleep 0.02; done"


@contextmanager
def stopped_again_and_again() -> Iterator[None]:
    stopper = subprocess.Popen(["sh", "-c", _STOPPED, str(os.getpid())])
    try:
        yield
    finally:
        stopper.kill()
        stopper.wait()


@contextmanager
def slow_to_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    read = Prefetcher.next

    def slowly(self: Prefetcher) -> Batch:
        time.sleep(0.3)
        return read(self)

    with monkeypatch.context() as patched:
        patched.setattr(Prefetcher, "next", slowly)
        yield


def with_long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block takes its time, on every rank: what else a machine does meanwhile is little beside that."""
    forward = Block.forward

    def slowly(self: Block, *given: Any, **named: Any) -> Any:
        time.sleep(0.05)
        return forward(self, *given, **named)

    monkeypatch.setattr(Block, "forward", slowly)
    monkeypatch.setattr("shardwise.trace.slowness.SECONDS_BETWEEN_LOOKS", 0.0)


def run_slowed(job: Job, rank: int, how: str | None) -> Any:
    with pytest.MonkeyPatch.context() as monkeypatch:
        with_long_steps(monkeypatch)
        if dist.get_rank() == rank and how == "compute":
            with stopped_again_and_again():
                return train_rank(job)
        if dist.get_rank() == rank and how == "data":
            with slow_to_read(monkeypatch):
                return train_rank(job)
        return train_rank(job)


def named(folder: Path) -> set[tuple[int, str]]:
    return {(each["rank"], each["cause"]) for each in read_journal(folder) if each["event"] == "slow"}


@pytest.mark.parametrize("how", ["compute", "data", None])
def test_a_rank_that_is_slowed_down_is_named_with_the_cause(two: Ranks, tmp_path: Path, how: str | None) -> None:
    job = make_job(tmp_path / "run", "dp=2", steps=14, log=1)
    two.run(run_slowed, job, 1, how)
    found = named(tmp_path / "run")
    assert (found == set()) if how is None else ((1, how) in found and {rank for rank, _ in found} == {1})
