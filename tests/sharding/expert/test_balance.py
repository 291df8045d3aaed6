"""Balance over ranks, and what else must not depend on where experts lie."""

import pytest
import torch

from shardwise.ranks.spawn import Ranks
from tests.sharding.expert import balancing


@pytest.mark.parametrize("weights", [[0.5, 0.5], [0.3, 0.7]])
def test_the_balancing_loss_is_that_of_all_tokens_however_much_a_rank_weighs(two: Ranks, weights: list[float]) -> None:
    for found, wanted, slope, gradient in two.run(balancing.losses_of_uneven_parts, weights):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
        torch.testing.assert_close(slope, gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("model", ["ours like deepseek", "deepseek-v3"])
def test_rows_that_experts_would_round_are_rounded_before_they_travel(two: Ranks, model: str) -> None:
    # 2 x 6 tokens of a rank go to 3 experts of the first, from the second there and back; 8 experts are counted.
    num_layers = 1 if model.startswith("ours") else 3
    for found, wanted, sent in two.run(balancing.in_bfloat16, model):
        assert found == pytest.approx(wanted, rel=2e-2)
        assert sent == num_layers * (2 * 12 * 3 * 32 * 2 + 4 * 8)


@pytest.mark.parametrize("model", ["ours like mixtral", "mixtral"])
def test_a_rank_makes_its_experts_as_the_whole_module_would(two: Ranks, model: str) -> None:
    assert two.run(balancing.made_from_nothing, model) == [[], []]


def test_one_device_alone_is_left_as_it_is() -> None:
    found, wanted = balancing.alone()
    assert torch.equal(found, wanted)
