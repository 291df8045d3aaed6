"""What a GPU decides where a recipe leaves it open: bf16 and compiled blocks where they pay, and what is said of it."""

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from shardwise.cli import main
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.torch_private import can_step_divided
from shardwise.training import device_defaults
from shardwise.training.device_defaults import Choice, choose_compile, choose_precision, line_of_choices
from shardwise.training.folder import RECIPE
from shardwise.training.make_engine import make_optimizer
from shardwise.training.recipe import OptimizerChoice, Recipe, get_recipe, read_recipe

LARGE = Recipe().changed(
    {"model.width": 1024, "model.layers": 12, "model.heads": 16, "batch": 16, "data.sequence": 1024, "steps": 20_000}
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine that says that it has an H200."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(device_defaults, "find_missing", lambda _: None)
    return monkeypatch


def test_on_processors_nothing_is_chosen_and_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    precision, compile = choose_precision(LARGE, 1), choose_compile(LARGE, Plan())
    assert (precision, compile) == (Choice("fp32"), Choice("off"))
    assert line_of_choices(precision, compile) is None


@pytest.mark.usefixtures("gpu")
def test_a_long_run_of_a_large_model_is_in_bf16_and_compiled_and_both_are_said() -> None:
    precision = choose_precision(LARGE, 1)
    compile = choose_compile(LARGE, Plan(precision=precision.value))
    assert (precision.value, compile.value) == ("bf16", "on")
    line = line_of_choices(precision, compile)
    assert line is not None
    assert line.startswith(
        "on NVIDIA H200: bf16, as matmuls are up to 15 times as fast as in fp32; blocks compiled, as"
    )
    assert line.endswith("(else: --set precision=fp32 --set compile=off)")


@pytest.mark.usefixtures("gpu")
def test_what_is_too_small_to_pay_is_left_as_it_is_and_that_is_said_too() -> None:
    recipe = get_recipe("bytes")
    precision = choose_precision(recipe, 1)
    compile = choose_compile(recipe, Plan(precision=precision.value))
    assert (precision.value, compile.value) == ("fp32", "off")
    line = line_of_choices(precision, compile)
    assert line is not None
    assert "fp32 (TF32 off), as a step of 21.9 GFLOP on a rank is too small for bf16 to pay" in line
    assert "is too short to compile for" in line
    assert line.endswith("(else: --set precision=bf16 --set compile=on)")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("plan", "changes", "why"),
    [
        ("tp=2", {}, "under tp=2 ranks talk inside of blocks"),
        ("dp=2,ep=2", {}, "under ep=2 ranks talk inside of blocks"),
        ("dp=1,offload.optimizer=1", {}, "a part of the state lives on the host"),
        ("dp=1", {"model.dropout": 0.1}, "masks of dropout"),
        ("dp=1", {"model.experts": 8}, "masks of dropout and rows of experts"),
        ("dp=1", {"steps": 3}, "is too short to compile for"),
    ],
)
def test_blocks_are_not_compiled_where_they_cannot_be_or_need_not(
    plan: str, changes: dict[str, object], why: str
) -> None:
    found = choose_compile(LARGE.changed(changes), Plan.parse(plan))
    assert found.value == "off"
    assert why in found.why


def test_without_triton_blocks_are_as_they_are(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(device_defaults, "find_missing", lambda _: "Triton")
    assert choose_compile(LARGE, Plan()) == Choice("off", "Triton is not found")


def test_a_gpu_without_bf16_is_in_fp32_and_refuses_it_in_a_sentence(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 0))
    gpu.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla V100-SXM2-32GB")
    assert choose_precision(LARGE, 1) == Choice("fp32", "it has no bf16")
    with pytest.raises(ShardwiseError) as caught:
        choose_precision(LARGE.changed({"precision": "bf16"}), 1)
    assert str(caught.value) == (
        "precision=bf16, and Tesla V100-SXM2-32GB of compute capability 7.0 has none: it came with 8.0\n"
        "  try: --set precision=fp16, or --set precision=fp32"
    )


def test_a_run_that_goes_on_keeps_the_precision_that_was_chosen_where_it_began(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "tiny", "--devices", "1", "--set", "evaluation.sample=0", "--folder", str(tmp_path), "--json"]
    assert main([*words, "--set", "steps=2", "--set", "precision=fp16"]) == 0
    assert read_recipe(tmp_path / RECIPE).precision == "fp16"
    assert main([*words, "--set", "steps=3"]) == 0, capsys.readouterr().err
    assert read_recipe(tmp_path / RECIPE).precision == "fp16"
    assert '"precision": "fp16"' in capsys.readouterr().out


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_optimizers_are_fused_where_parameters_will_be_on_a_gpu(name: Literal["adamw", "sgd"]) -> None:
    """`train` makes modules on the meta device: without this, steps on a GPU wait for the host."""
    choice = OptimizerChoice(name=name)
    for here, device, fuses in (("meta", "cuda", True), ("meta", "cpu", False), ("cpu", "cuda", False)):
        weights = [nn.Parameter(torch.empty(2, 2, device=here))]
        made = make_optimizer(choice, weights, device=torch.device(device))
        assert can_step_divided(made) == fuses
        assert bool(made.param_groups[0]["fused"]) == fuses
    assert not can_step_divided(make_optimizer(choice, weights, may_fuse=False, device=torch.device("cuda")))
