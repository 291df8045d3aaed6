"""Signals, wherever they find a run; and what a rank has found wrong, as a person reads it."""

import signal
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main
from shardwise.ranks.rank_error import RankError
from shardwise.ranks.spawn import Ranks
from shardwise.training.data.tokens import TokenWriter
from shardwise.training.stop import Forwarded, StopSignals

WORDS = ["train", "tiny", "--plan", "dp=2", "--folder", "run"]


@pytest.mark.usefixtures("interruptible")
def test_a_first_signal_is_remembered_and_a_second_does_what_it_does() -> None:
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("interruptible")
def test_a_signal_before_there_are_ranks_ends_the_run_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), Forwarded(Ranks(2)):
        signal.raise_signal(signal.SIGINT)


def test_a_rank_that_did_not_listen_yet_is_no_failure() -> None:
    stop = Forwarded(Ranks(2))
    killed = RankError("rank 1 was killed by SIGTERM (signal 15)", rank=1)
    assert not stop.has_ended(killed), "nobody has sent a signal"
    stop.number = signal.SIGTERM
    assert stop.has_ended(killed)
    assert stop.has_ended(RankError("rank 0 failed: KeyboardInterrupt: \n    Traceback ...", rank=0))
    assert not stop.has_ended(RankError("rank 0 failed: ValueError: no", rank=0))


class _Failing(Ranks):
    """Ranks of which one has found something wrong."""

    error = RankError(
        "rank 0 failed: embed.weight in x is damaged\n    Traceback (most recent call last):\n    ...",
        remedy="rm -r x",
        rank=0,
    )

    def run(self, *_: Any, **__: Any) -> list[Any]:
        raise self.error


def test_a_mistake_that_a_rank_has_found_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardwise.training.local_ranks.Ranks", _Failing)
    assert main(WORDS) == 1
    assert capsys.readouterr().err == "error: rank 0 failed: embed.weight in x is damaged\n  try: rm -r x\n"
    # A mistake of ours keeps its story.
    monkeypatch.setattr(_Failing, "error", RankError("rank 0 failed: KeyError\n    Traceback ...", rank=0))
    assert main(WORDS) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_to_is_told_before_ranks_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").write_text("a file")
    assert main(WORDS) == 1
    assert capsys.readouterr().err == (
        "error: the folder run cannot be written to: File exists\n  try: another --folder\n"
    )


def test_damaged_data_is_told_with_its_place_before_ranks_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with TokenWriter(tmp_path / "t.tokens", vocabulary=256, tokenizer="bytes") as writer:
        writer.add(b"text " * 1000)
    whole = (tmp_path / "t.tokens").read_bytes()
    (tmp_path / "t.tokens").write_bytes(whole[:4200] + b"!" + whole[4201:])
    assert main([*WORDS, "--set", "data.source=t.tokens"]) == 1
    assert "t.tokens is damaged between the bytes 4096 and 9096" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
