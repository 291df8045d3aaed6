"""A rank that is stopped is named by the others, wherever they wait for it. SIGSTOP is real; the limit is small."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwise.ranks import pulse
from shardwise.ranks.pulse import SILENT, Pulse, Silence, key_of, place_in
from shardwise.ranks.rank_error import RankError
from shardwise.ranks.spawn import Ranks
from shardwise.torch_private import Store
from shardwise.training.checkpoint import write
from shardwise.training.job import Job
from shardwise.training.loop import Loop
from shardwise.training.run import train_rank
from shardwise.training.world import World
from tests.apart import run_script
from tests.ranks.processes import nobody_runs
from tests.training.programs import make_job

#: They have ranks of their own, forked where the shared ones are.
pytestmark = pytest.mark.xdist_group("ranks")
#: A machine that is very busy keeps a rank silent for some seconds.
LIMIT_SECONDS = 8.0


def stop_me() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave_number(folder: Path) -> None:
    """As `nobody_runs` reads it, which is about a rank and a process that it has started."""
    folder.mkdir(exist_ok=True)
    (folder / f"rank{dist.get_rank()}").write_text(f"{os.getpid()} {os.getpid()}")


def wait_at(what: str, folder: Path) -> None:
    """The first rank waits, at something that no watch knows of; the second is stopped."""
    leave_number(folder)
    world = World() if what == "world" else None
    if dist.get_rank() == 1:
        stop_me()
    if world is not None:
        world.highest(1.0)
    elif what == "group":
        dist.new_group(backend="gloo")
    else:
        time.sleep(600)


@pytest.mark.whole
@pytest.mark.parametrize("what", ["world", "group", "nothing at all"])
def test_a_rank_that_is_stopped_is_named_wherever_the_others_are(what: str, tmp_path: Path) -> None:
    with Ranks(2, silent_seconds=LIMIT_SECONDS) as ranks, pytest.raises(RankError) as caught:
        ranks.run(wait_at, what, tmp_path, timeout_seconds=120)
    assert caught.value.rank == 1
    assert caught.value.problem.startswith("rank 1 has not answered for ")
    assert caught.value.remedy == "the same command again: what was saved is whole"
    assert nobody_runs(tmp_path, num_ranks=2)


def stop_all(folder: Path) -> None:
    leave_number(folder)
    dist.barrier()
    stop_me()


def test_when_all_are_stopped_who_started_them_says_so(tmp_path: Path) -> None:
    with Ranks(2, silent_seconds=LIMIT_SECONDS) as ranks, pytest.raises(RankError, match="has not answered for"):
        ranks.run(stop_all, tmp_path, timeout_seconds=120)
    assert nobody_runs(tmp_path, num_ranks=2)


def stopped_when(when: str, job: Job) -> None:
    """Train, and stop the second rank between two steps, or while it writes its part of a checkpoint."""
    leave_number(job.folder)
    if dist.get_rank() == 1:
        if when == "between steps":
            look_up: Callable[[Loop, int], None] = Loop._look_up

            def stopped(loop: Loop, step: int) -> None:
                look_up(loop, step)
                stop_me()

            setattr(Loop, "_look_up", stopped)  # noqa: B010 - in this process, which ends with the test
        else:
            setattr(write, "write_files", lambda *_: stop_me())  # noqa: B010
    train_rank(job)


@pytest.mark.parametrize("when", ["between steps", pytest.param("while it saves", marks=pytest.mark.whole)])
def test_a_rank_of_a_run_that_is_stopped_is_named(when: str, tmp_path: Path) -> None:
    job = make_job(tmp_path, "dp=2", steps=6, checkpoint__every=2)
    with Ranks(2, silent_seconds=LIMIT_SECONDS) as ranks, pytest.raises(RankError) as caught:
        ranks.run(stopped_when, when, job, timeout_seconds=120)
    assert caught.value.rank == 1
    assert "rank 1 has not answered for " in caught.value.problem
    assert "; it was last at " in caught.value.problem
    assert nobody_runs(tmp_path, num_ranks=2)


class FakeStore:
    """A store of one process."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def clone(self) -> "FakeStore":
        return self

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.kept[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.kept for key in keys)

    def add(self, key: str, number: int) -> int:
        self.kept[key] = str(int(self.kept.get(key, b"0")) + number).encode()
        return int(self.kept[key])


def test_silence_is_counted_only_while_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = FakeStore(), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    looking: Store = store  # type: ignore[assignment]
    silence = Silence(looking, 3, 20.0)

    def after(*seconds: float) -> list[bool]:
        found = []
        for each in seconds:
            now[0] += each
            found.append(silence.is_too_long())
        return found

    assert after(*[9.0] * 7) == [False] * 6 + [True], "one that has not begun has three times as long"
    store.set(key_of(3), '[1, "training/loop.py, run"]')
    assert after(1.0, 9.0, 9.0, 9.0) == [False, False, False, True]
    assert silence.error().problem.startswith("rank 3 has not answered for 27 s; it was last at training/loop.py, run.")
    assert after(60.0, 9.0) == [False, False], "who was stopped himself has not looked"
    store.set(key_of(3), '["ended", ""]')
    assert after(9.0, 9.0, 9.0, 9.0) == [False] * 4
    assert silence.has_ended


def test_a_process_that_ends_says_so_and_its_neighbour_looks_at_the_next() -> None:
    store = FakeStore()
    shared: Store = store  # type: ignore[assignment]
    gone = Pulse(shared, 1, 3, limit_seconds=0.4)
    gone.close()
    assert store.kept[key_of(1)].startswith(b'["ended"')
    first = Pulse(shared, 0, 3, limit_seconds=30.0)
    first._beat = 0.01
    deadline = time.monotonic() + 20
    while first._next.rank != 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert first._next.rank == 2
    assert SILENT not in store.kept
    first.close()


#: Garbage whose end takes a lock of all threads, made as often as the collector runs: with `sys._current_frames` in the
#: place of `_place`, Python 3.11.7 stands still within a second.
_LOOKED_AT_WHILE_COLLECTED = """
import gc, sys, threading, time
from shardwise.ranks.pulse import Pulse
from tests.ranks.test_pulse import FakeStore

class Garbage:
    def __init__(self):
        self.me, self.local = self, threading.local()

pulse = Pulse(FakeStore(), 0, 1)
pulse._closed.set()
gc.set_threshold(3)

def look():
    while True:
        Garbage()
        pulse._place()

threading.Thread(target=look, daemon=True).start()
end = time.monotonic() + 1
while time.monotonic() < end:
    threading.Thread(target=Garbage).start()
"""


def test_a_process_that_is_looked_at_while_it_collects_garbage_goes_on(tmp_path: Path) -> None:
    """Forked, it need not import torch; and what was imported is frozen, so that it collects all the more often."""
    script = tmp_path / "looked_at.py"
    script.write_text(_LOOKED_AT_WHILE_COLLECTED)
    done = run_script(script, folder=tmp_path, timeout_seconds=120)
    assert done.returncode == 0, done.stderr


def test_the_place_is_the_innermost_of_ours_but_of_this_room() -> None:
    ours = Path(pulse.__file__).parents[1]
    stacks = f"""Thread 0x0000000000000007 (most recent call first):
  File "{ours}/training/save.py", line 3 in save

Current thread 0x0000000000000019 (most recent call first):
  File "torch/nn/module.py", line 3 in call
  File "{ours}/ranks/wires.py", line 7 in gather
  File "{ours}/training/loop.py", line 9 in run
  File "{ours}/training/run.py", line 1 in <module>
"""
    assert place_in(stacks, 0x19) == "training/loop.py, run"
    assert place_in(stacks, 7) == "training/save.py, save"
    assert place_in(stacks, 8) == "the start or the end"
