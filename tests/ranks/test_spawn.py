"""Ranks as processes: what they return, how they fail, and that none is left."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from shardwise.environment import num_cores
from shardwise.errors import ShardwiseError
from shardwise.ranks.rank_error import RankError
from shardwise.ranks.spawn import Ranks, spawn
from tests.engine import programs
from tests.promises.sources import PACKAGE
from tests.ranks.processes import nobody_runs, processes_in

#: They have ranks of their own, forked where the shared ones are.
pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Three ranks that stay up; those that a test ends are started again by the next."""
    with Ranks(3) as started:
        yield started


def test_every_rank_returns_its_own_in_the_order_of_ranks(ranks: Ranks) -> None:
    threads = max(1, num_cores() // 3)
    assert ranks.run(programs.greet, "hello") == [(rank, 3, "hello", threads, 3.0) for rank in range(3)]


def test_ranks_stay_up_from_one_function_to_the_next(ranks: Ranks) -> None:
    ranks.run(programs.greet, "one")
    before = ranks.process_ids
    ranks.run(programs.greet, "two")
    assert ranks.process_ids == before


def test_tensors_come_back_whole(ranks: Ranks) -> None:
    for rank, result in enumerate(ranks.run(programs.tensors)):
        assert torch.equal(result["rank"], torch.full((2, 3), float(rank)))
        assert result["rank"].requires_grad


def test_ranks_have_the_environment_of_the_moment_they_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_TEST", "now")
    assert spawn(programs.variable, 1, ("SHARDWISE_TEST",)) == ["now"]


@pytest.mark.parametrize(("said", "num_groups"), [(None, 1), ("5", 1), (None, 64)])
def test_ranks_share_the_cores_unless_the_user_says_how_many_threads(
    monkeypatch: pytest.MonkeyPatch, said: str | None, num_groups: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    with Ranks(2, num_groups=num_groups) as made:
        found = made.run(programs.variable, "OMP_NUM_THREADS")
        used = made.run(torch.get_num_threads)
    right = said or str(max(1, num_cores() // (2 * num_groups)))
    assert found == [right] * 2
    assert used == [int(right)] * 2
    assert os.environ.get("OMP_NUM_THREADS") == said, "of this process nothing is changed"


@pytest.mark.parametrize("culprit", [0, 2])
def test_the_rank_that_raised_is_named_with_its_traceback_and_all_are_ended(
    ranks: Ranks, culprit: int, tmp_path: Path
) -> None:
    ranks.run(programs.greet, "up")
    with pytest.raises(RankError) as caught:
        ranks.run(programs.raise_on, culprit, tmp_path)
    assert caught.value.rank == culprit
    assert caught.value.problem.startswith(f"rank {culprit} failed: ValueError: boom on {culprit}\n")
    assert "in raise_on" in caught.value.problem
    assert nobody_runs(tmp_path)


@pytest.mark.parametrize(
    ("how", "text"),
    [("kill", "rank 1 was killed by SIGKILL (signal 9)"), ("exit", "rank 1 exited with status 3")],
)
def test_a_rank_that_dies_is_named_with_how(ranks: Ranks, how: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(programs.end_on, 1, how, tmp_path)
    assert caught.value.rank == 1
    assert text in caught.value.problem
    assert nobody_runs(tmp_path)


def test_time_that_is_up_ends_all(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(programs.greet, "up")
    with pytest.raises(RankError, match="ranks 0, 1, 2 of 3 had not returned when the time was up"):
        ranks.run(programs.sleep, 60, tmp_path, timeout_seconds=1)
    assert nobody_runs(tmp_path)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_all(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(programs.greet, "up")
    threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        ranks.run(programs.sleep, 60, tmp_path)
    assert nobody_runs(tmp_path)


def test_ranks_end_with_the_process_that_started_them_even_if_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import sys, pathlib
        from shardwise.ranks.spawn import spawn
        from tests.engine.programs import sleep

        if __name__ == "__main__":
            spawn(sleep, 2, (60, pathlib.Path(sys.argv[1])))
        """)
    )
    paths = os.pathsep.join([str(PACKAGE.parent), str(PACKAGE.parents[1])])
    with subprocess.Popen([sys.executable, script, tmp_path], env={**os.environ, "PYTHONPATH": paths}) as parent:
        deadline = time.monotonic() + 120
        while len(processes_in(tmp_path)) < 4 and time.monotonic() < deadline:
            time.sleep(0.1)
        parent.kill()
    assert nobody_runs(tmp_path, num_ranks=2)


def test_a_script_that_starts_ranks_when_it_is_read_is_told_of_the_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from shardwise.ranks.spawn import spawn\nspawn(print, 1)\n")
    finished = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        timeout=300,
    )
    assert finished.returncode == 1
    # Once, and by the process that was called alone.
    assert finished.stderr.decode().count('try: if __name__ == "__main__":') == 1
    assert finished.stderr.decode().count("Traceback") == 1


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (lambda: None, "cannot be sent to other processes"),
        (programs.lock, "what rank 0 returned cannot be sent back: cannot pickle '_thread.lock' object"),
    ],
)
def test_what_cannot_travel_is_said(fn: Callable[[], object], text: str) -> None:
    with pytest.raises(ShardwiseError) as caught:
        spawn(fn, 1)
    assert text in str(caught.value)


def test_less_than_one_rank_is_refused() -> None:
    with pytest.raises(ShardwiseError, match="0 devices: at least 1 rank is needed"):
        spawn(print, 0)


def test_more_ranks_than_a_machine_can_start_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.environment.num_cores", lambda: 2)
    with pytest.raises(ShardwiseError, match="129 ranks are too many for one machine with 2 cores") as caught:
        spawn(print, 129)
    assert "devices=128 or fewer" in str(caught.value.remedy)


def test_a_server_that_ended_while_ranks_are_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def start(self) -> None:
            raise EOFError

    ranks = Ranks.__new__(Ranks)
    ended = []
    monkeypatch.setattr(ranks, "_kill", lambda: ended.append(True))
    with pytest.raises(ShardwiseError, match=r"the server that ranks are forked from has ended \(EOFError\)"):
        ranks._begin(Gone())
    assert ended == [True]
