"""One run in one folder: whoever comes second is told who is there, and nobody waits for one that was killed."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main
from shardwise.errors import ShardwiseError
from shardwise.training import lock as locks
from shardwise.training.lock import LOCK, RunLock

ROOT = Path(__file__).parents[2]
HOLD = """
import sys, time
from pathlib import Path
from shardwise.training.lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""
#: So quick that a test need not wait.
QUICK: dict[str, Any] = {"beat_seconds": 0.05, "watched_seconds": 0.4}


def held_by_another(folder: Path) -> subprocess.Popen[str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_is_told_of_the_first_and_a_killed_one_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    other = held_by_another(tmp_path / "run")
    try:
        # The whole command, before any rank is started.
        assert main(["train", "tiny", "--plan", "dp=2", "--folder", "run"]) == 1
        told = capsys.readouterr().err
        assert told.startswith(f"error: the run in run is being trained by process {other.pid} on ")
        assert told.endswith("  try: another --folder; or this one, when that run has ended\n")
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [LOCK], "nothing was touched"
        # Stopped is not gone.
        os.kill(other.pid, signal.SIGSTOP)
        with pytest.raises(ShardwiseError, match="is being trained by process"), RunLock(tmp_path / "run"):
            pass
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.communicate()
    assert (tmp_path / "run" / LOCK).exists(), "it had no time to say goodbye"
    with RunLock(tmp_path / "run"):
        owner = json.loads((tmp_path / "run" / LOCK).read_bytes())
        assert owner["process"] == os.getpid()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_folder_is_free_again_also_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), RunLock(tmp_path):
        raise KeyError
    with RunLock(tmp_path), pytest.raises(ShardwiseError, match="is being trained by process"), RunLock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def write_owner(folder: Path, count: int, host: str = "elsewhere") -> None:
    (folder / LOCK).write_text(json.dumps({"host": host, "process": 1, "since": "then", "count": count}))


def test_an_owner_on_another_machine_is_alive_if_it_counts(tmp_path: Path) -> None:
    """As on a file system that does not carry locks from one machine to another."""
    ended = threading.Event()

    def count() -> None:
        number = 0
        while not ended.wait(0.05):
            number += 1
            write_owner(tmp_path, number)

    write_owner(tmp_path, 0)
    thread = threading.Thread(target=count)
    thread.start()
    try:
        with pytest.raises(ShardwiseError, match="by process 1 on elsewhere since then"), RunLock(tmp_path, **QUICK):
            pass
    finally:
        ended.set()
        thread.join()
    # It has been killed: it counts no more.
    with RunLock(tmp_path, **QUICK):
        assert json.loads((tmp_path / LOCK).read_bytes())["process"] == os.getpid()


def test_where_there_are_no_locks_the_count_is_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "fcntl", None)
    first = RunLock(tmp_path, **QUICK)
    with first, pytest.raises(ShardwiseError, match="is being trained by process"), RunLock(tmp_path, **QUICK):
        pass
    write_owner(tmp_path, 3)
    with RunLock(tmp_path, **QUICK):
        pass


def test_a_link_is_no_lock(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    (tmp_path / LOCK).symlink_to("there")
    with pytest.raises(ShardwiseError, match=r"the lock .* cannot be written: "), RunLock(tmp_path):
        pass
    assert (tmp_path / "there").read_text() == "mine"
