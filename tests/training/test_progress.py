"""What a person sees while a model trains: a bar on a terminal, lines in a file."""

import io

import pytest

from shardwise.training.progress import Progress, told_of


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def told(**changed: float | None) -> str:
    given = {"loss": 2.5, "rate": 1e-3, "tokens_per_second": 61_234.0, "memory_bytes": 2.0**35, "bubble": 0.0}
    return told_of(**{**given, **changed})  # type: ignore[arg-type]


def test_on_a_gpu_mfu_and_the_share_of_its_memory_are_told() -> None:
    assert told() == "loss 2.5000  rate 1.0e-03  61.2k tokens/s  fullest 32.0 GiB  bubble 0.0 %"
    assert told(mfu=0.512, memory_share=0.25) == (
        "loss 2.5000  rate 1.0e-03  61.2k tokens/s  MFU 51.2 %  fullest 32.0 GiB (25.0 %)  bubble 0.0 %"
    )


def test_a_file_gets_a_line_for_each_step_that_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    progress = Progress(speaks=True)
    with progress.bar(0, 20):
        progress.step(1, 20, "loss 2.5")
        progress.step(2, 20, None)
        progress.say("step 2: held-out loss 2.4")
    assert stream.getvalue() == "step  1/20  loss 2.5\nstep 2: held-out loss 2.4\n"


def test_a_terminal_gets_a_bar_and_lines_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    progress = Progress(speaks=True)
    with progress.bar(0, 20):
        progress.step(1, 20, "loss 2.5")
        progress.say("step 1: held-out loss 2.4")
        progress.step(20, 20, "loss 2.1")
    written = stream.getvalue()
    assert "step  1/20" not in written, "no lines but what is said"
    assert "step 1: held-out loss 2.4" in written
    assert "20/20" in written
    assert "loss 2.1" in written
    assert "\x1b[" in written, "it is drawn over"


def test_who_does_not_speak_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    progress = Progress(speaks=False)
    with progress.bar(0, 2):
        progress.step(1, 2, "loss")
        progress.say("nothing")
    assert stream.getvalue() == ""
