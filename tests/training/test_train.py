"""`shardwise train`, from what is typed to what lies in the folder of the run."""

import errno
import json
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.cli import main
from shardwise.nets.block import Block
from shardwise.nets.settings import Settings
from shardwise.nets.transformer import Transformer
from shardwise.planner.plan import Plan
from shardwise.ranks.spawn import Ranks
from shardwise.trace.metrics import read_metrics
from shardwise.training import model
from shardwise.training.checkpoint.index import Entry, FileOutline, find_last, saved_steps
from shardwise.training.checkpoint.parts import Part
from shardwise.training.checkpoint.write import Mark, write_parts
from shardwise.training.data.rows import Batch, Batches
from shardwise.training.job import Job
from shardwise.training.outcome import Result, StoppedError
from shardwise.training.run import train_rank
from tests.apart import Command
from tests.training.programs import losses_of, make_job

ROOT = Path(__file__).parents[2]
PLANS = ("tp=2,dp=2", "cp=2,pp=2,schedule=zb-h1,microbatches=4")
MORE_PLANS = ("dp=4,zero=1", "pp=4,microbatches=4")


def test_a_run_leaves_all_that_is_needed_to_run_it_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert main(["train", "tiny", "--devices", "2", "--folder", str(folder), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["step"] == 8
    assert answer["sample"].startswith("def ")
    assert 4.5 < answer["loss"] < 5.3
    names = {path.name for path in folder.iterdir()}
    assert names >= {"recipe.toml", "plan.toml", "manifest.json", "metrics.jsonl", "trace.json", "report.html"}
    assert saved_steps(folder / "checkpoints") == [4, 8]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert Plan.parse(manifest["plan"]).num_ranks == 2
    assert {"versions", "hardware", "seed", "data_digest", "command"} <= manifest.keys()
    rows = read_metrics(folder)
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 9))
    assert [row["step"] for row in rows if "held_out_loss" in row] == [4, 8]
    assert all(row["memory_bytes"] > 0 for row in rows if "bubble" in row)
    # The same command again: there is nothing left to do, and nothing is lost.
    assert main(["train", "--folder", str(folder), "--devices", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 8
    assert read_metrics(folder) == rows


@pytest.mark.parametrize("plans", [PLANS, pytest.param(MORE_PLANS, marks=pytest.mark.whole)], ids=["two", "two more"])
def test_the_curve_is_the_same_under_every_plan(plans: Sequence[str], four: Ranks, tmp_path: Path) -> None:
    alone = make_job(tmp_path / "alone", "dp=1", steps=4)
    train_rank(alone)
    for number, plan in enumerate(plans):
        job = make_job(tmp_path / str(number), plan, steps=4)
        four.run(train_rank, job)
        assert losses_of(job.folder) == pytest.approx(losses_of(alone.folder), rel=1e-4)


def test_a_run_that_was_stopped_goes_on_to_the_very_same_losses(tmp_path: Path) -> None:
    train_rank(make_job(tmp_path / "whole", "dp=1", steps=6))
    for steps in (2, 3, 6):
        train_rank(make_job(tmp_path / "parts", "dp=1", steps=steps))
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")


def test_ctrl_c_saves_and_stops_and_the_run_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["train", "tiny", "--devices", "2", "--folder", str(folder), "--set", "steps=100000"]
    variables = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = Command(*words, folder=tmp_path, variables=variables)
    while command.is_up and len(losses_of(folder) if (folder / "metrics.jsonl").is_file() else []) < 6:
        time.sleep(0.05)
    command.interrupt()
    finished = command.finish(120)
    assert finished.returncode == 130, finished.stderr
    assert "stopped by SIGINT" in finished.stdout
    assert f"it goes on with: shardwise train --folder {folder}" in finished.stdout
    last = losses_of(folder)
    assert saved_steps(folder / "checkpoints")[-1] == len(last)
    assert main(["train", "--folder", str(folder), "--devices", "1", "--set", f"steps={len(last) + 1}"]) == 0
    assert losses_of(folder)[:-1] == last


def test_sigterm_saves_and_stops_and_is_no_longer_heard_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    at = Batches.at

    def terminated(batches: Batches, step: int) -> Batch:
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return at(batches, step)

    monkeypatch.setattr(Batches, "at", terminated)
    stopped = train_rank(make_job(tmp_path, "dp=1", steps=1000))
    assert isinstance(stopped, Result)
    assert stopped.stopped_by == "SIGTERM"
    assert saved_steps(tmp_path / "checkpoints") == [stopped.step] == [len(losses_of(tmp_path))]
    assert signal.getsignal(signal.SIGTERM) is before


class _Spoilt(nn.Module):
    """Returns infinity once it has been called often enough."""

    def __init__(self, inner: nn.Module, calls: int) -> None:
        super().__init__()
        self.inner, self.calls = inner, calls

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls -= 1
        output: torch.Tensor = self.inner(hidden)
        return output if self.calls > 0 else output / 0


def test_a_loss_that_is_not_finite_stops_the_run_with_step_rank_and_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = model.make_module

    def spoilt(settings: Settings, *, tp: int, device: torch.device) -> Transformer:
        module = made(settings, tp=tp, device=device)
        block = module.layers[1]
        assert isinstance(block, Block)
        block.register_module("mlp", _Spoilt(block.mlp, 10))
        return module

    monkeypatch.setattr("shardwise.training.model.make_module", spoilt)
    monkeypatch.setattr("shardwise.training.model.draw", lambda *_: None)
    stopped = train_rank(make_job(tmp_path, "dp=1", steps=50, checkpoint__every=1))
    assert isinstance(stopped, StoppedError)
    step = saved_steps(tmp_path / "checkpoints")[-1] + 1
    assert stopped.problem == (
        f"at step {step} the loss is nan: the first layer whose output has NaN is layers.1.mlp, on rank 0"
    ) or stopped.problem.endswith("the first layer whose output has infinity is layers.1.mlp, on rank 0")
    last = find_last(tmp_path / "checkpoints")
    assert last is not None


class _Poison(torch.autograd.Function):
    """Hands values on, and NaN back."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - what a function is given
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return gradient * float("nan")


class _Poisoned(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(hidden)
        return _Poison.apply(output)  # type: ignore[no-any-return, no-untyped-call]


def poisoned_run(job: Job) -> Result | StoppedError | None:
    """A run whose third layer gives back gradients that are no numbers."""
    made = model.make_module

    def poisoned(settings: Settings, *, tp: int, device: torch.device) -> Transformer:
        module = made(settings, tp=tp, device=device)
        block = module.layers[2]
        assert isinstance(block, Block)
        block.register_module("mlp", _Poisoned(block.mlp))
        return module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.training.model.make_module", poisoned)
        patch.setattr("shardwise.training.model.draw", lambda *_: None)
        return train_rank(job)


def test_gradients_that_are_not_finite_stop_the_run_with_step_rank_and_layer(two: Ranks, tmp_path: Path) -> None:
    job = make_job(tmp_path, "pp=2,microbatches=2", steps=5, model__layers=4)
    for told in two.run(poisoned_run, job):
        assert isinstance(told, StoppedError)
        assert re.fullmatch(
            r"at step 1 the loss is \d\.\d+ and the norm of the gradients is nan: the first layer whose gradient has"
            r" NaN is layers\.2\.mlp\.inner\.\w+, in its weight, on rank 1",
            told.problem,
        ), told.problem
    assert losses_of(tmp_path) == []


def test_a_run_without_a_bound_asks_for_no_norm_and_learns_the_same(tmp_path: Path) -> None:
    for name, clip in (("without", 0.0), ("high", 1e6)):
        train_rank(make_job(tmp_path / name, "dp=1", steps=2, optimizer__clip=clip))
    assert losses_of(tmp_path / "without") == losses_of(tmp_path / "high")
    norms = {
        name: [row for row in read_metrics(tmp_path / name) if "gradient_norm" in row] for name in ("without", "high")
    }
    assert (len(norms["without"]), len(norms["high"])) == (0, 2)


def test_a_run_of_another_recipe_is_refused(tmp_path: Path) -> None:
    train_rank(make_job(tmp_path, "dp=1", steps=1))
    assert main(["train", "tiny", "--folder", str(tmp_path), "--devices", "1"]) == 1


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--devices", "0"], "--devices 0: it must be at least 1"),
        (["--plan", "dp=3", "--devices", "2"], "plan dp=3 needs 3 ranks but there are 2"),
        (["--set", "steps"], "--set steps has no value"),
        (["--set", "data.source=absent.tokens", "--devices", "1"], "the token file absent.tokens cannot be read"),
        (["--set", "model.folder=absent", "--devices", "1"], "absent"),
        (["--plan", "tp=3", "--devices", "3"], "fewer than tp=3\n  try: tp=2"),
        (["--plan", "dp=3", "--devices", "3"], "a batch of 8 rows cannot be divided evenly under dp=3"),
        (["--plan", "dp=2,ep=2", "--devices", "2"], "has no experts for ep=2"),
        (["--plan", "pp=2,layers=1+5", "--devices", "2"], "there are 5 units, 2 of them blocks"),
        (["--plan", "zero=1", "--devices", "1"], "with dp=1 and cp=1 there is only one\n  try: dp=1"),
        (["--plan", "tp=2", "--devices", "2", "--set", "compile=on"], "cannot yet\n  try: --set compile=off"),
    ],
)
def test_mistakes_are_told_before_anything_is_started(
    words: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "tiny", "--folder", str(tmp_path / "run"), *words]) == 1
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_half_precision_scales_its_loss_and_leaves_steps_out_that_overflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.training.precision._FIRST", 2.0**14)
    train_rank(
        make_job(tmp_path / "half", "dp=1,precision=fp16", steps=12, precision="fp16", batch=4, data__sequence=16)
    )
    rows = [row for row in read_metrics(tmp_path / "half") if "loss" in row]
    skipped = [row["skipped"] for row in rows]
    assert skipped[0]
    assert not skipped[-1]
    assert rows[-1]["loss_scale"] == 2.0 ** (14 - sum(skipped))
    first = skipped.index(False)
    assert all(row["loss"] == pytest.approx(rows[0]["loss"], rel=0.02) for row in rows[:first]), "nothing was learned"
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_a_run_that_is_brought_back_with_fewer_ranks_is_planned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("WORLD_SIZE", "3"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    words = ["train", "tiny", "--plan", "dp=4", "--folder", str(tmp_path), "--set", "batch=12", "--show", "--json"]
    assert main(words) == 1
    assert "plan dp=4 needs 4 ranks but there are 3" in capsys.readouterr().out
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    assert main(words) == 0
    assert Plan.parse(json.loads(capsys.readouterr().out)["plan"]).num_ranks == 3


@pytest.mark.parametrize("on_failure", ["warn", "stop"])
def test_a_disk_that_fills_up_while_training_leaves_the_old_checkpoint(
    on_failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, parts: Sequence[Part], mark: Mark) -> tuple[dict[str, Entry], FileOutline]:
        if "step-00000002" in str(path):
            return write_parts(path, parts, mark)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shardwise.training.checkpoint.write.write_parts", full)
    told = train_rank(make_job(tmp_path, "dp=1", steps=6, checkpoint__every=2, checkpoint__on_failure=on_failure))
    problem = f"the checkpoint of step 4 cannot be written to {tmp_path / 'checkpoints'}: No space left on device; "
    if on_failure == "stop":
        assert isinstance(told, StoppedError)
        assert told.problem == problem + "step-00000002 is still there"
    else:
        assert f"warning: {problem}step-00000002 is still there, and training goes on" in capfd.readouterr().err
        assert len(losses_of(tmp_path)) == 6
    assert saved_steps(tmp_path / "checkpoints") == [2]


def test_blocks_that_cannot_be_compiled_run_as_they_are_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("ptxas is not what it was")

    monkeypatch.setattr("shardwise.stages.compiled._inductor", broken)
    monkeypatch.setattr("shardwise.stages.compiled.find_missing", lambda _: None)
    monkeypatch.setattr("shardwise.training.precision.LossScale.compile", lambda _: None)
    job = replace(make_job(tmp_path / "chosen", "dp=1", steps=2), compile=True, is_chosen=True, said="on a GPU: bf16")
    result = train_rank(job)
    assert isinstance(result, Result)
    assert (result.step, result.compiled) == (2, False)
    told = capsys.readouterr().err
    assert told.startswith("on a GPU: bf16\n")
    assert "warning: blocks cannot be compiled here, so they run as they are: RuntimeError: ptxas is not what" in told
    # Who has asked for them is told that they cannot be had.
    with pytest.raises(Exception, match="ptxas is not what it was"):
        train_rank(replace(job, folder=tmp_path / "asked", is_chosen=False))


def test_a_run_that_has_nothing_left_to_do_says_so_and_no_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "tiny", "--devices", "1", "--set", "steps=2", "--set", "evaluation.sample=0"]
    assert main([*words, "--folder", str(tmp_path)]) == 0
    assert " tokens/s" in capsys.readouterr().out
    assert main([*words, "--folder", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("step 2, nothing was left to do\n")
    assert "tokens/s" not in out


def test_a_run_goes_on_under_its_own_plan_unless_another_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default another would be chosen here: there are more cores than one."""
    few = [word for each in ("checkpoint.every=0", "evaluation.sample=0") for word in ("--set", each)]
    assert main(["train", "tiny", "--plan", "dp=1", "--folder", str(tmp_path), "--set", "steps=1", *few]) == 0
    capsys.readouterr()
    assert main(["train", "--folder", str(tmp_path), "--set", "steps=2", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["plan"] == "dp=1"
    assert "it goes on under its own plan dp=1 (else: --plan auto)" in told.err
    assert main(["train", "--folder", str(tmp_path), "--devices", "2", "--show", "--json"]) == 0
    assert Plan.parse(json.loads(capsys.readouterr().out)["plan"]).num_ranks == 2
    assert main(["train", "--folder", str(tmp_path), "--plan", "dp=2", "--show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"] == "dp=2"
