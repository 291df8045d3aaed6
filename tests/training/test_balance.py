"""Experts of a run kept equally busy: the same under every plan, and gone on with to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.cli import main
from shardwise.errors import ShardwiseError
from shardwise.ranks.spawn import Ranks
from shardwise.trace.metrics import read_metrics
from shardwise.training.balance import imbalance_of
from shardwise.training.checkpoint.index import find_last, read_index
from shardwise.training.convert import convert
from shardwise.training.recipe import get_recipe
from shardwise.training.run import train_rank
from tests.crowd import Crowds
from tests.training.programs import losses_of, make_job, saved_state

#: Both ways to balance, often enough to be seen in a few steps.
BALANCED: dict[str, Any] = {"model__experts": 8, "balance__bias_rate": 0.01, "balance__place_every": 2}


def imbalances_of(folder: Path) -> list[float]:
    return [row["expert_imbalance"] for row in read_metrics(folder) if "expert_imbalance" in row]


def moves_of(folder: Path) -> int:
    return sum(row.get("experts_moved", 0) for row in read_metrics(folder))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one device, with four microbatches."""
    folder = tmp_path_factory.mktemp("alone")
    train_rank(make_job(folder, "dp=1,microbatches=4", steps=5, **BALANCED))
    return folder


@pytest.mark.parametrize(
    ("plan", "num_ranks"),
    [
        ("dp=2,ep=2,zero=3", 2),
        # What routers count under it is held by `tests/sharding/expert/test_loads.py`.
        pytest.param("dp=2,ep=2,tp=2,zero=1", 4, marks=pytest.mark.whole),
        pytest.param("dp=2,ep=2,pp=2,schedule=dualpipe,microbatches=4", 4, marks=pytest.mark.whole),
    ],
)
def test_a_balanced_run_is_the_same_under_every_plan(
    crowds: Crowds, alone: Path, tmp_path: Path, plan: str, num_ranks: int
) -> None:
    job = make_job(tmp_path, plan, steps=5, **BALANCED)
    crowds.of(num_ranks).run(train_rank, job, timeout_seconds=120)
    assert losses_of(tmp_path) == pytest.approx(losses_of(alone), rel=1e-4)
    assert imbalances_of(tmp_path) == pytest.approx(imbalances_of(alone), rel=1e-2)
    assert moves_of(tmp_path) > 0
    ours, theirs = saved_state(tmp_path), saved_state(alone)
    biases = [name for name in ours if name.endswith("router.correction")]
    assert len(biases) == 2
    for name in biases:
        # Of a choice between two that are as good, rounding may decide, and then a bias has gone the other way once.
        assert torch.count_nonzero((ours[name] - theirs[name]).abs() > 1e-6) <= 1, name
        assert ours[name].abs().max() > 0.02


def test_a_run_that_was_stopped_goes_on_with_its_biases_and_places_to_the_bit(two: Ranks, tmp_path: Path) -> None:
    # The third step is between two placements: what was counted since the first of them is gone on with too.
    plan = "dp=2,ep=2,zero=1"
    two.run(train_rank, make_job(tmp_path / "whole", plan, steps=6, **BALANCED))
    for steps in (3, 6):
        two.run(train_rank, make_job(tmp_path / "parts", plan, steps=steps, **BALANCED))
    assert moves_of(tmp_path / "whole") > 0
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")
    assert imbalances_of(tmp_path / "parts") == imbalances_of(tmp_path / "whole")
    whole, parts = (find_last(tmp_path / name / "checkpoints") for name in ("whole", "parts"))
    assert whole is not None
    assert parts is not None
    assert read_index(whole).extra["experts"] == read_index(parts).extra["experts"]
    expected = saved_state(tmp_path / "whole")
    for name, each in saved_state(tmp_path / "parts").items():
        assert torch.equal(each, expected[name]), name


@pytest.mark.whole
@pytest.mark.parametrize("after", ["pp=2,microbatches=2", "dp=2,ep=2,zero=3"])
def test_it_goes_on_under_another_plan(two: Ranks, tmp_path: Path, after: str) -> None:
    two.run(train_rank, make_job(tmp_path / "whole", "dp=2,ep=2", steps=5, **BALANCED))
    for steps, plan in ((3, "dp=2,ep=2"), (5, after)):
        two.run(train_rank, make_job(tmp_path / "parts", plan, steps=steps, **BALANCED))
    assert losses_of(tmp_path / "parts") == pytest.approx(losses_of(tmp_path / "whole"), rel=1e-5)
    train_rank(make_job(tmp_path / "parts", "dp=1", steps=6, **BALANCED))
    assert len(losses_of(tmp_path / "parts")) == 6


def test_a_bias_evens_the_load_and_dense_models_have_none(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 30, "model__experts": 8, "model__chosen_experts": 1, "optimizer__rate": 1e-4}
    for name, rate in (("with", 1e-3), ("without", 0.0)):
        train_rank(make_job(tmp_path / name, "dp=1", **settings, balance__bias_rate=rate))
    with_bias, without = (sum(imbalances_of(tmp_path / name)[-10:]) / 10 for name in ("with", "without"))
    assert with_bias < 0.75 * without
    train_rank(make_job(tmp_path / "dense", "dp=1", steps=1))
    assert imbalances_of(tmp_path / "dense") == []


def test_a_loss_evens_the_load_too_and_its_folder_is_that_of_a_plain_model(tmp_path: Path) -> None:
    train_rank(make_job(tmp_path / "run", "dp=1", steps=2, model__experts=4, balance__loss=0.1))
    plain = make_job(tmp_path / "plain", "dp=1", steps=2, model__experts=4)
    train_rank(plain)
    assert losses_of(tmp_path / "run")[0] > losses_of(tmp_path / "plain")[0] + 0.1
    assert convert(tmp_path / "run", tmp_path / "hf")[0] == "huggingface"


def test_a_bias_that_hugging_face_has_no_place_for_is_not_lost_without_a_word(tmp_path: Path) -> None:
    train_rank(make_job(tmp_path / "run", "dp=1", steps=1, evaluation__sample=4, **BALANCED))
    with pytest.raises(ShardwiseError, match=r"choose with a bias .*, for which a mixtral model has no place"):
        convert(tmp_path / "run", tmp_path / "hf")


def test_imbalance_is_of_the_layer_where_it_is_highest() -> None:
    assert imbalance_of({"a": [2, 2, 2, 2], "b": [5, 1, 1, 1], "c": [0, 0]}) == 2.5
    assert imbalance_of({}) is None


@pytest.mark.parametrize(
    ("changes", "problem", "remedy"),
    [
        ({"balance.bias_rate": -1}, "balance.bias_rate=-1.0 is negative", "balance.bias_rate=0"),
        ({"balance.loss": -0.5, "model.experts": 4}, "balance.loss=-0.5 is negative", "balance.loss=0"),
        ({"balance.place_every": 1.5}, "balance.place_every in the test wants a whole number, and is 1.5", None),
        ({"balance.bias_rate": 0.1}, "balance.bias_rate=0.1 balances experts, and model.experts=0 has none", None),
        ({"balance.place_every": 3}, "balance.place_every=3 balances experts, and model.experts=0 has none", None),
        ({"balance.rate": 0.1}, "unknown key 'balance.rate'; known: ", "balance.bias_rate"),
        (
            {"balance.loss": 0.1, "model.source": "a:b"},
            "balance.loss=0.1 is for routers of ours, and the module of model.source=a:b has its own",
            "balance.loss=0, or a loss in that module",
        ),
    ],
)
def test_what_cannot_be_balanced_is_said(changes: dict[str, Any], problem: str, remedy: str | None) -> None:
    with pytest.raises(ShardwiseError) as caught:
        get_recipe("tiny").changed(changes, source="the test")
    assert caught.value.problem.startswith(problem)
    assert remedy is None or caught.value.remedy == remedy


def test_a_folder_whose_routers_have_no_bias_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_rank(make_job(tmp_path / "run", "dp=1", steps=1, model__experts=4))
    convert(tmp_path / "run", tmp_path / "hf")
    words = ["train", "tiny", "--devices", "2", "--folder", str(tmp_path / "new"), "--set"]
    assert main([*words, f"model.folder={tmp_path / 'hf'}", "--set", "balance.bias_rate=0.01"]) == 1
    said = capsys.readouterr().err
    assert f"balance.bias_rate=0.01 moves a bias that the routers of the model in {tmp_path / 'hf'} do not have" in said
    assert not (tmp_path / "new" / "checkpoints").exists()
