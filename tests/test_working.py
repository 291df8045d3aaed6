"""A terminal is shown what long work is at; a file, a pipe and --json get nothing of it."""

import io
import sys
import time

import pytest

from shardwise import working
from shardwise.cli import main
from shardwise.working import step_aside, working_at, working_on


class Terminal(io.StringIO):
    """What was drawn on it, with what was drawn over."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(working, "_PATIENCE_SECONDS", 0.0)


def shown_after(stream: io.StringIO, text: str) -> bool:
    """Whether a text stands on a stream, which a thread draws, within a while."""
    deadline = time.monotonic() + 20
    while text not in stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.02)
    return text in stream.getvalue()


def test_a_terminal_shows_what_is_done_and_how_much_and_is_clean_afterwards() -> None:
    terminal = Terminal()
    with working_on(terminal):
        working_at("ways to divide the devices", 384, 5000)
        assert shown_after(terminal, "ways to divide the devices")
        assert shown_after(terminal, "384 of 5,000")
    last = terminal.getvalue()
    assert last.rstrip().endswith(("\x1b[2K", "\x1b[?25h"))
    working_at("nothing of this", 1, 2)
    assert terminal.getvalue() == last


def test_who_steps_aside_draws_no_more() -> None:
    terminal = Terminal()
    with working_on(terminal):
        working_at("the search")
        assert shown_after(terminal, "the search")
        step_aside()
        last = terminal.getvalue()
        working_at("something else")
        time.sleep(0.3)
        assert terminal.getvalue() == last


def test_a_pipe_gets_nothing() -> None:
    pipe = io.StringIO()
    with working_on(pipe):
        working_at("the search", 1, 2)
        time.sleep(0.1)
    assert pipe.getvalue() == ""


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_a_command_shows_its_work_but_for_machines(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    command = ["plan", "llama-3-8b", "--cluster", "8xh100", "--batch", "64", "--sequence", "4096", *words]
    assert main(command) == 0
    assert bool(terminal.getvalue()) == (not words)
