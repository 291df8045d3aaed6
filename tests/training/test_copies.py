"""Copies in memory: a run whose rank is killed comes back from them, also where a machine is gone with its memory."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from shardwise.copies.keepers import forget_copies, holders_of, survey
from shardwise.copies.memory import find_id
from shardwise.launch.run_status import status_of
from shardwise.ranks.rank_error import RankError
from shardwise.ranks.spawn import Ranks
from shardwise.trace.journal import read_journal
from shardwise.trace.metrics import read_metrics
from shardwise.training.copying import _steps_between, _Told
from shardwise.training.job import Job
from shardwise.training.run import train_rank
from tests.training.programs import losses_of, make_job

ROOT = Path(__file__).parents[2]
STEPS = 12


def on_nodes(job: Job, memory: str) -> None:
    """Every rank has a machine of its own: another name, and other memory."""
    torch.set_num_threads(1)
    os.environ.update(SHARDWISE_COPIES=memory, PYTHONPATH=str(ROOT / "src"))
    os.environ["NODE_NAME"] = f"node{os.environ.get('RANK', torch.distributed.get_rank())}"
    try:
        train_rank(job)
    finally:
        for name in ("SHARDWISE_COPIES", "NODE_NAME"):
            del os.environ[name]


def slow(job: Job, memory: str) -> None:
    """Steps that somebody has the time to kill."""
    from shardwise.training.loop import Loop

    plain = Loop._look_up

    def look_up(self: Loop, step: int) -> None:
        plain(self, step)
        time.sleep(0.3)

    Loop._look_up = look_up  # type: ignore[method-assign]
    on_nodes(job, memory)


@pytest.fixture(scope="module")
def calm_losses(two: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Of a run in which nobody is killed."""
    calm = make_job(tmp_path_factory.mktemp("calm"), "dp=2,zero=1", steps=STEPS)
    two.run(train_rank, calm)
    return losses_of(calm.folder)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SHARDWISE_COPIES", str(tmp_path / "memory"))
    yield tmp_path / "memory"
    forget_copies(tmp_path / "wild")


def killed_at(job: Job, memory: Path, step: int, *, copied: int = 0, on_disk: bool = False) -> None:
    """Run it, and kill -9 its last rank after a step, when its neighbour has its copy of step `copied` too; and when a
    checkpoint is `on_disk`: it is written beside the steps."""
    with Ranks(2) as ranks:

        def has_copy() -> bool:
            holders = holders_of(survey(job.folder)) if copied else {}
            return not copied or any(each.step >= copied and "node0" in held[1] for each, held in holders.items())

        def is_written() -> bool:
            return not on_disk or any(job.folder.glob("checkpoints/step-*"))

        def kill() -> None:
            while (
                not any(row["step"] >= step for row in read_metrics(job.folder)) or not has_copy() or not is_written()
            ):
                time.sleep(0.01)
            os.kill(ranks.process_ids[1], signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        with pytest.raises(RankError):
            ranks.run(slow, job, str(memory))
        thread.join()


def starts(folder: Path) -> list[tuple[int, Any]]:
    return [(each["step"], each.get("source")) for each in read_journal(folder) if each["event"] == "start"]


def node_memory(memory: Path, run: Path, node: str) -> Path:
    return memory / f"shardwise-{os.getuid()}" / (find_id(run) or "none") / node


def test_a_killed_rank_costs_no_disk_and_a_lost_machine_neither(
    two: Ranks, calm_losses: list[float], memory: Path, tmp_path: Path
) -> None:
    job = replace(make_job(tmp_path / "wild", "dp=2,zero=1", steps=STEPS), copies_every=2)
    killed_at(job, memory, 5, copied=4)
    assert not (job.folder / "checkpoints").exists(), "nothing was on disk"
    # The whole machine of rank 1 is gone, with its keeper.
    lost = node_memory(memory, job.folder, "node1")
    shutil.rmtree(lost)
    while "node1" in survey(job.folder):
        time.sleep(0.01)
    newest = next(iter(holders_of(survey(job.folder))))
    assert newest.step >= 4, "the neighbour has all of it"
    status = status_of(job.folder)
    assert (status.copy_step, status.copy_nodes) == (newest.step, ("node0",))
    two.run(on_nodes, job, str(memory))
    assert starts(job.folder) == [(0, None), (newest.step, "memory")]
    assert losses_of(job.folder) == calm_losses, "to the bit"
    assert not survey(job.folder), "the run is over, and its memory free"


def test_a_damaged_copy_is_told_of_and_an_older_one_or_the_disk_is_taken(
    two: Ranks, calm_losses: list[float], memory: Path, tmp_path: Path
) -> None:
    job = replace(make_job(tmp_path / "wild", "dp=2,zero=1", steps=STEPS, checkpoint__every=7), copies_every=2)
    killed_at(job, memory, 8, copied=8, on_disk=True)
    for path in memory.rglob("rank-00001.safetensors"):
        content = bytearray(path.read_bytes())
        content[-40] ^= 1
        path.write_bytes(content)
    # Under another plan each rank reads other boxes.
    two.run(on_nodes, replace(job, plan=make_job(tmp_path, "tp=2").plan), str(memory))
    assert starts(job.folder)[1:] == [(7, "disk")], "copies are newer, and damaged"
    said = [each["problem"] for each in read_journal(job.folder) if "problem" in each]
    assert said
    assert all("is damaged between the bytes" in each for each in said)
    assert losses_of(job.folder) == pytest.approx(calm_losses, rel=1e-5)


def test_too_little_memory_is_a_sentence_and_the_run_goes_on(two: Ranks, memory: Path, tmp_path: Path) -> None:
    job = replace(make_job(tmp_path / "wild", "dp=2,zero=1", steps=4), copies_every=1)
    two.run(with_little_memory, job, str(memory))
    assert len(losses_of(job.folder)) == 4
    (said,) = [each["problem"] for each in read_journal(job.folder) if "problem" in each]
    assert said.startswith("copies in memory need ")
    assert "of node0, and it has 1.0 KiB left, of which they may have 90%" in said


def with_little_memory(job: Job, memory: str) -> None:
    from shardwise.training import copying

    with mock.patch.object(copying, "available_bytes", return_value=1024):
        on_nodes(job, memory)


@pytest.mark.parametrize(
    ("cost", "step", "every"), [(0.0, 0.0, 2), (0.02, 1.0, 4), (0.001, 1.0, 1), (0.05, 0.1, 84), (1.0, 1e-9, 10_000)]
)
def test_copies_are_so_far_apart_that_they_cost_less_than_a_hundredth(cost: float, step: float, every: int) -> None:
    told = _Told(is_busy=False, apart=None, cost_seconds=cost, step_seconds=step)
    assert _steps_between([told, told]) == every


def test_a_copy_that_cannot_be_written_leaves_the_one_before_and_takes_no_room(
    two: Ranks, memory: Path, tmp_path: Path
) -> None:
    job = replace(make_job(tmp_path / "wild", "dp=2,zero=1", steps=9), copies_every=2)
    found = two.run(with_full_memory, job, str(memory))
    assert found[0] == [[2], [2, 4], [2, 6], [2, 8]], "4 and 6 failed"
    said = [each["problem"] for each in read_journal(job.folder) if "problem" in each]
    assert [each.partition(" cannot")[0] for each in said] == ["the copy of step 4"], "once"
    assert len(losses_of(job.folder)) == 9


def with_full_memory(job: Job, memory: str) -> list[list[int]]:
    """The second and the third copy find no room. Returns which steps were in memory after each."""
    from shardwise.training.checkpoint import in_memory
    from shardwise.training.checkpoint.write import write_files
    from shardwise.training.copying import Copier

    seen: list[list[int]] = []
    plain_copy = Copier.copy

    def write(folder: Path, *rest: Any) -> Any:
        if any(f"step-0000000{step}" in folder.name for step in (4, 6)):
            (folder / "rank-00000.safetensors").write_bytes(b"some of it")
            raise OSError(28, "No space left on device")
        return write_files(folder, *rest)

    def copy(self: Copier, step: int) -> None:
        while self._writer is not None and self._writer.is_busy:
            time.sleep(0.001)
        assert self._copies is not None
        plain_copy(self, step)
        while self._writer is not None and self._writer.is_busy:
            time.sleep(0.001)
        seen.append([each.step for each in self._copies.memory.generations()])

    with mock.patch.object(in_memory, "write_files", write), mock.patch.object(Copier, "copy", copy):
        on_nodes(job, memory)
    return seen
