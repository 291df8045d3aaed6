"""A process on standby: what is forked from it is what was asked for, and ends with who stands for it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.copies.memory import draw_id, memory_of
from shardwise.standby.asker import find_server
from tests.ranks.processes import are_gone

ROOT = Path(__file__).parents[2]
ASKED = """
import os, sys, time
print(os.getpid(), os.getppid(), os.getcwd(), os.environ["COLOUR"], *sys.argv[1:], flush=True)
if "wait" in sys.argv:
    time.sleep(60)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a run that has a process on standby."""
    monkeypatch.setenv("SHARDWISE_COPIES", str(tmp_path / "memory"))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{tmp_path}")
    monkeypatch.setenv("NODE_NAME", "here")
    (tmp_path / "asked.py").write_text(ASKED)
    folder = tmp_path / "run"
    memory_of(draw_id(folder), "here").make()
    words = ["--folder", str(folder), "--node", "here", "--imports", "shardwise.units"]
    with subprocess.Popen([sys.executable, "-m", "shardwise.standby.server", *words]) as server:
        while (connection := find_server(folder)) is None:
            time.sleep(0.01)
        connection.close()
        yield folder
        (folder / "copies/id").unlink()
        assert server.wait(10) == 0, "it ends with the run"


def ask(run: Path, directory: Path, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "shardwise.standby", "--folder", str(run), "asked", *words],
        env={**os.environ, "COLOUR": "blue"}, cwd=directory, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def told(process: "subprocess.Popen[str]") -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def test_what_is_asked_for_runs_where_and_as_it_was_asked(run: Path, tmp_path: Path) -> None:
    with ask(run, tmp_path, "3", "more") as process:
        own, parent, directory, colour, *words = told(process)
        assert process.wait(20) == 3
    assert int(own) != process.pid
    assert int(parent) != os.getpid()
    assert (directory, colour, words) == (str(tmp_path), "blue", ["3", "more"])


def test_signals_pass_and_neither_outlives_the_other(run: Path, tmp_path: Path) -> None:
    with ask(run, tmp_path, "0", "wait") as process:
        own = int(told(process)[0])
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == -signal.SIGTERM
        assert are_gone([own])
    with ask(run, tmp_path, "0", "wait") as process:
        os.kill(int(told(process)[0]), signal.SIGKILL)
        assert process.wait(20) == -signal.SIGKILL
    with ask(run, tmp_path, "0", "wait") as process:
        own = int(told(process)[0])
        process.kill()
        process.wait()
        assert are_gone([own])


def test_without_a_process_on_standby_it_runs_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{tmp_path}")
    (tmp_path / "asked.py").write_text(ASKED)
    with ask(tmp_path / "none", tmp_path, "5") as process:
        assert int(told(process)[0]) == process.pid
        assert process.wait(20) == 5


def test_what_was_forked_ends_when_the_agent_is_killed(run: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "shardwise.standby", "--folder", str(run), "asked", "0", "wait"]
    agent = f"import subprocess; subprocess.run({words!r})"
    with subprocess.Popen(
        [sys.executable, "-c", agent],
        env={**os.environ, "COLOUR": "red"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        own = int(told(process)[0])
        process.kill()
        process.wait()
        assert are_gone([own])
