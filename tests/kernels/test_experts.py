"""Routing, sorting by expert, and back."""

import pytest
import torch

from shardwise import ShardwiseError, kernels
from shardwise.kernels.experts import Order
from tests.kernels.against import assert_alike, random_of


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalised", [True, False])
def test_routes_are_those_of_the_definition(scores: str, normalised: bool) -> None:
    for num_experts, num_chosen in ((5, 2), (8, 8), (1, 1), (130, 3)):
        logits = torch.stack([torch.randperm(num_experts) for _ in range(3)]) / 64 - 0.5  # No two are equal.
        for dtype in (torch.float32, torch.bfloat16):
            given = logits.to(dtype).requires_grad_()
            assert_alike(kernels.route, (given, num_chosen), scores=scores, normalised=normalised, scale=2.5)
    correction = torch.randperm(16) / 8.0
    assert_alike(kernels.route, (random_of(6, 16), 4), scores=scores, normalised=normalised, correction=correction)


def test_a_row_of_nan_goes_to_experts_that_exist() -> None:
    logits = torch.full((2, 6), torch.nan)
    weights, experts = kernels.route(logits, 3)
    assert weights.isnan().all()
    assert experts.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_choices_are_sorted_by_expert_and_within_one_by_token() -> None:
    made = kernels.make_order(torch.tensor([[2, 0], [1, 0], [0, 2]]), 3)
    assert made.order.tolist() == [1, 3, 4, 2, 0, 5]
    assert made.counts.tolist() == [3, 1, 2]
    assert kernels.make_order(torch.empty((0, 2), dtype=torch.int64), 3).counts.tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_go_to_experts_and_come_back_with_their_weights(dtype: torch.dtype) -> None:
    for tokens, width in ((5, 12), (9, 2100)):
        order = kernels.make_order(torch.randint(4, (tokens, 3)), 4)
        assert_alike(kernels.permute, (random_of(tokens, width, dtype=dtype), order))
        outputs, weights = random_of(3 * tokens, width, dtype=dtype), random_of(tokens, 3)
        assert_alike(kernels.unpermute, (outputs, weights, order))


def test_a_choice_that_is_dropped_gives_nothing() -> None:
    order = kernels.make_order(torch.tensor([[2, 0], [1, 0], [0, 2]]), 3)
    short = Order(order.order[:4], order.rows, torch.tensor([3, 1, 0]))
    outputs, weights = random_of(4, 8), random_of(3, 2)
    assert_alike(kernels.permute, (random_of(3, 8), short))
    assert_alike(kernels.unpermute, (outputs, weights, short))


def test_every_expert_multiplies_its_rows() -> None:
    rows, weights = torch.randn(6, 4), torch.randn(3, 4, 5)
    made = kernels.grouped_matmul(rows, weights, torch.tensor([2, 0, 4]))
    torch.testing.assert_close(made, torch.cat((rows[:2] @ weights[0], rows[2:] @ weights[2])))


def test_more_experts_than_there_are_cannot_be_chosen() -> None:
    with pytest.raises(ShardwiseError, match="9 experts cannot be chosen of 8"):
        kernels.route(torch.randn(2, 8), 9)
    with pytest.raises(ShardwiseError, match="unknown scores 'sofmax'"):
        kernels.route(torch.randn(2, 8), 2, scores="sofmax")
