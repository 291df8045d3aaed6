"""Experts shared out: loss and every gradient are those of one device that has the whole batch and all experts."""

import pytest

from shardwise.ranks.spawn import Ranks
from tests.sharding.expert import programs
from tests.sharding.expert.models import MODELS


def same(outcomes: list[programs.Outcome]) -> None:
    for outcome in outcomes:
        assert outcome.loss < 1e-5
        assert outcome.worst < 1e-5, outcome.where
        assert outcome.norm < 1e-5
        assert not outcome.missing


@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_share_out_the_experts(two: Ranks, model: str) -> None:
    same(two.run(programs.parity, model, "dp=2,ep=2", timeout_seconds=120))


#: Of ours and of transformers, with 8, 4 and 6 experts: of 6, 4 ranks have 2, 2, 1 and 1. Two ranks see all models.
ON_FOUR = ("ours like deepseek", "mixtral", "qwen3-moe", "gpt-oss")


@pytest.mark.parametrize(
    "model", [pytest.param(each, marks=() if each in ON_FOUR else pytest.mark.whole) for each in MODELS]
)
def test_four_ranks_share_out_the_experts(four: Ranks, model: str) -> None:
    same(four.run(programs.parity, model, "dp=4,ep=4", timeout_seconds=120))


@pytest.mark.parametrize("model", ["ours like deepseek", "qwen3-moe"])
def test_experts_may_be_on_several_ranks(four: Ranks, model: str) -> None:
    same(four.run(programs.parity, model, "dp=4,ep=2", timeout_seconds=120))


@pytest.mark.parametrize("model", ["ours like mixtral", "ours like deepseek"])
def test_replicas_without_shared_out_experts_have_the_balancing_loss_of_one_device(two: Ranks, model: str) -> None:
    same(two.run(programs.parity, model, "dp=2", timeout_seconds=120))


@pytest.mark.parametrize("model", ["ours like deepseek", pytest.param("deepseek-v3", marks=pytest.mark.whole)])
def test_a_rank_that_no_token_comes_to_takes_part_and_has_zero_gradients(four: Ranks, model: str) -> None:
    outcomes = four.run(programs.parity, model, "dp=4,ep=4", True, timeout_seconds=120)
    same(outcomes)
    assert all(not any(load[3:]) and all(load[:3]) for load in outcomes[0].load.values())


@pytest.mark.parametrize("model", [pytest.param("deepseek-v3", marks=pytest.mark.whole), "mixtral"])
def test_experts_that_are_cut_inside_are_shared_out_too(four: Ranks, model: str) -> None:
    same(four.run(programs.parity, model, "dp=2,tp=2,ep=2", False, True, timeout_seconds=120))


# 36 rows of a replica in two parts; with the correction all of them go to the first rank of each pair.
@pytest.mark.parametrize(
    ("model", "to_the_first"),
    [
        ("ours like deepseek", False),
        ("deepseek-v3", True),
        pytest.param("ours like deepseek", True, marks=pytest.mark.whole),
        pytest.param("deepseek-v3", False, marks=pytest.mark.whole),
    ],
)
def test_ranks_with_the_same_tokens_send_a_part_each(four: Ranks, model: str, to_the_first: bool) -> None:
    outcomes = four.run(programs.parity, model, "dp=2,tp=2,ep=2", to_the_first, False, True, timeout_seconds=120)
    same(outcomes)
    chosen = [sum(load) for load in outcomes[0].load.values()]
    assert chosen == [4 * 6 * 3] * len(chosen)
