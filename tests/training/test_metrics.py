"""Metrics: rows that any program can read, a disk without room, and TensorBoard."""

import contextlib
import json
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main
from shardwise.errors import ShardwiseError
from shardwise.trace.metrics import read_metrics
from shardwise.training.checkpoint.index import saved_steps
from shardwise.training.finish import finish
from shardwise.training.loop import Loop
from shardwise.training.metrics import Metrics
from shardwise.training.outcome import Outcome, Result
from shardwise.training.progress import Progress
from shardwise.training.run import train_rank
from tests.training.programs import losses_of, make_job


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def no_room_for(work: Callable[..., Result]) -> Callable[..., Result]:
    """The same, while no file may grow."""

    def without(*given: Any) -> Result:
        with room_for(40):
            return work(*given)

    return without


def test_every_line_is_json_whatever_the_numbers_are(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, after=0)
    metrics.add({"step": 1, "loss": float("nan"), "gradient_norm": float("inf"), "rate": 0.5})
    metrics.close()

    def refused(word: str) -> None:
        raise ValueError(f"{word} is not valid JSON")

    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=refused) == {"step": 1, "loss": None, "gradient_norm": None, "rate": 0.5}


def test_a_row_that_does_not_fit_on_the_disk_is_left_out_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(tmp_path, after=0)
    assert metrics.add({"step": 1, "loss": 1.0}) is None
    with room_for(path.stat().st_size + 5):
        problem = metrics.add({"step": 2, "loss": 2.0})
    assert problem is not None
    assert problem.startswith("the metrics of step 2 cannot be written: ")
    assert metrics.add({"step": 3, "loss": 3.0}) is None
    metrics.close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 3]


def test_a_run_whose_disk_fills_up_trains_on_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_rank(make_job(tmp_path, "dp=1", steps=1))
    run, warnings = Loop.run, list[str]()

    def without_room(loop: Loop) -> Outcome:
        with room_for((tmp_path / "metrics.jsonl").stat().st_size):
            return run(loop)

    monkeypatch.setattr(Loop, "run", without_room)
    monkeypatch.setattr("shardwise.training.run.finish", no_room_for(finish))
    monkeypatch.setattr(Progress, "warn", lambda _, text: warnings.append(text))
    told = train_rank(make_job(tmp_path, "dp=1", steps=4, checkpoint__every=1))
    assert [text.partition(" cannot be")[0] for text in warnings] == [
        "the metrics of step 2",  # Once, and not for each step.
        *(f"the checkpoint of step {step}" for step in (2, 3, 4)),
        "the report of this run",
    ]
    assert isinstance(told, Result)
    assert told.step == 4
    assert len(losses_of(tmp_path)) == 1
    assert saved_steps(tmp_path / "checkpoints") == [1]
    # One that is begun without room ends at once; with room it goes on.
    monkeypatch.undo()
    recipe = (tmp_path / "recipe.toml").read_text()
    with room_for(40), pytest.raises(ShardwiseError, match=r"recipe.toml cannot be written: "):
        train_rank(make_job(tmp_path, "dp=1", steps=9))
    assert (tmp_path / "recipe.toml").read_text() == recipe, "what was there is still there"
    train_rank(make_job(tmp_path, "dp=1", steps=4))
    assert len(losses_of(tmp_path)) == 4


def test_lines_of_progress_that_nobody_can_read_do_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        Progress(speaks=True).warn("nobody will read this")
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()


def test_tensorboard_has_the_same_curves_and_those_of_a_restart_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in (2, 4):
        train_rank(make_job(tmp_path, "dp=1", steps=steps, tensorboard=True))
    curves = EventAccumulator(str(tmp_path / "tensorboard"))
    curves.Reload()
    seen = [(each.step, each.value) for each in curves.Scalars("loss")]
    assert [step for step, _ in seen] == [1, 2, 3, 4]
    assert [value for _, value in seen] == pytest.approx(losses_of(tmp_path), rel=1e-6)
    assert {"rate", "gradient_norm", "tokens_per_second", "held_out_loss"} <= set(curves.Tags()["scalars"])


def test_without_tensorboard_a_run_that_wants_it_is_refused_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    words = ["train", "tiny", "--devices", "1", "--folder", str(tmp_path / "run"), "--set", "tensorboard=true"]
    assert main(words) == 1
    assert capsys.readouterr().err == (
        "error: tensorboard=true, and TensorBoard is not installed\n  try: pip install 'shardwise[tensorboard]'\n"
    )
    assert not (tmp_path / "run").exists()
