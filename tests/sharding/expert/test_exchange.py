"""The exchange: what happens meanwhile, how many bytes are sent, and what a capacity drops."""

import pytest

from shardwise.ranks.spawn import Ranks
from tests.sharding.expert import exchanges, programs

WIDTH, NUM_EXPERTS, FLOAT_BYTES, COUNT_BYTES = 32, 8, 4, 8


def test_rows_lie_as_drawn(two: Ranks) -> None:
    assert two.run(exchanges.drawn) == [("a0 b0 a1 b1", True), ("a2 b2 a3 b3", True)]


@pytest.mark.parametrize(
    ("model", "shared"),
    [
        ("ours like deepseek", "layers.1.mlp.shared"),
        ("deepseek-v2", "model.layers.1.mlp.shared_experts"),
        ("deepseek-v3", "model.layers.1.mlp.shared_experts"),
    ],
)
def test_rows_travel_while_the_shared_expert_is_computed_forward_and_backward(
    two: Ranks, model: str, shared: str
) -> None:
    for events in two.run(exchanges.order_of_events, model, shared, True):
        assert " ".join(events) == "depart shared land | depart shared land"


def test_a_shared_expert_that_is_called_before_the_experts_is_computed_once(two: Ranks) -> None:
    for events in two.run(exchanges.order_of_events, "qwen2-moe", "model.layers.1.mlp.shared_expert", True):
        assert " ".join(events) == "shared depart land | depart land shared"


def test_without_overlap_the_shared_expert_waits(two: Ranks) -> None:
    for events in two.run(exchanges.order_of_events, "deepseek-v3", "model.layers.1.mlp.shared_experts", False):
        assert " ".join(events) == "depart land shared | shared depart land"


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_an_even_load_sends_what_the_formula_says(two: Ranks, four: Ranks, num_ranks: int) -> None:
    # Two exchanges forward and two backward, each of k tokens x hidden, of which a rank keeps its own share.
    ranks = two if num_ranks == 2 else four
    for sent, num_tokens, num_layers in ranks.run(exchanges.bytes_of_an_even_load, f"dp={num_ranks},ep={num_ranks}"):
        of_rows = 4 * (2 * num_tokens * WIDTH) * FLOAT_BYTES * (num_ranks - 1) // num_ranks
        of_counts = NUM_EXPERTS * COUNT_BYTES * (num_ranks - 1) // num_ranks
        assert sent == num_layers * (of_rows + of_counts)


def test_an_uneven_load_sends_each_row_there_and_back_twice(four: Ranks) -> None:
    # 6 tokens a rank go to the experts 0 and 1, on rank 0, and 2, on rank 1: of the one layer that has experts.
    sent, received = [6, 12, 18, 18], [36, 18, 0, 0]
    outcomes = four.run(programs.parity, "ours like deepseek", "dp=4,ep=4", True)
    for outcome, out, come in zip(outcomes, sent, received, strict=True):
        assert outcome.bytes["all_to_all"] == 2 * (out + come) * WIDTH * FLOAT_BYTES + 6 * COUNT_BYTES
        assert outcome.calls["all_to_all"] == 5


def test_a_capacity_drops_as_one_device_does_with_the_tokens_of_all_ranks(two: Ranks) -> None:
    for loss, gradient in two.run(exchanges.drops, 0.6):
        assert loss < 1e-5
        assert gradient < 1e-5
