"""What cannot be seen of a module is said to `parallelize`: how layers are cut, what masks and entries mean."""

from typing import Any

import pytest
from torch import Tensor

from shardwise.engine.parallelize import parallelize
from shardwise.errors import ShardwiseError
from shardwise.ranks.spawn import Ranks
from tests.ranks import telling

Trained = tuple[list[float], dict[str, Tensor], dict[str, str]]


@pytest.fixture(scope="module")
def plain() -> Trained:
    return telling.train("dp=1")


def check_same(found: list[Trained], plain: Trained) -> None:
    for losses, weights, _ in found:
        assert losses == pytest.approx(plain[0], rel=1e-5)
        for name, each in plain[1].items():
            assert float((weights[name] - each).norm()) <= 1e-5 * float(each.norm()), name


def test_layers_are_cut_as_a_dictionary_says(two: Ranks, plain: Trained) -> None:
    found = two.run(telling.train_cut, "tp=2", {"blocks.*.up": "column", "blocks.*.down": "row"})
    check_same(found, plain)
    assert set(found[0][2]) == {"blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"}
    whole = two.run(telling.train_cut, "tp=2", {"blocks.0": "whole"})
    check_same(whole, plain)
    assert "blocks.1.attention.q" in whole[0][2]
    assert not any(name.startswith("blocks.0") for name in whole[0][2])


def test_a_layer_that_is_not_there_is_told_with_the_nearest(two: Ranks) -> None:
    with pytest.raises(ShardwiseError) as error:
        two.run(telling.train_cut, "tp=2", {"blocks.*.upp": "column"})
    assert "no layer of the module is named 'blocks.*.upp'" in str(error.value)
    assert '"blocks.*.up"' in str(error.value)


@pytest.mark.parametrize("plan", ["cp=2", "cp=2,context=all-to-all,zero=3"])
def test_positions_entries_and_masks_are_what_is_said(two: Ranks, plan: str, plain: Trained) -> None:
    check_same(two.run(telling.train_in_context, plan), plain)


@pytest.mark.parametrize("plan", ["pp=2,microbatches=2", "dp=2,zero=1", "tp=2"])
def test_each_share_has_its_optimizer_under_every_plan(two: Ranks, plan: str) -> None:
    alone = telling.train("microbatches=2", "two")
    check_same(two.run(telling.train, plan, "two"), alone)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"plan": 3}, "plan is of type int"),
        ({"module": telling.Net}, "module is the class Net"),
        ({"loss": None}, "loss is of type NoneType"),
        ({"optimizer": []}, "optimizer is of type list"),
        ({"example": [1]}, "example is of type list"),
    ],
)
def test_arguments_of_another_kind_are_refused_with_a_sentence(changed: dict[str, Any], problem: str) -> None:
    given: dict[str, Any] = {
        "module": telling.Net(),
        "plan": "dp=1",
        "loss": telling.loss_of,
        "optimizer": telling.muon_and_adamw(),
        "example": telling.batch_of(0),
    }
    with pytest.raises(ShardwiseError) as error:
        parallelize(**{**given, **changed})
    assert error.value.problem.startswith(problem)
    assert error.value.remedy
