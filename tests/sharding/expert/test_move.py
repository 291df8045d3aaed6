"""Experts move between steps, and training does not notice."""

import pytest

from shardwise.errors import ShardwiseError
from shardwise.ranks.spawn import Ranks
from shardwise.sharding.expert import Placement
from tests.sharding.expert import training


def unnoticed(plain: list[training.Training], moved: list[training.Training], *, in_order: bool) -> None:
    """An expert's rows are the same wherever it lies, and `in_order`: libraries that multiply by where memory begins
    may round otherwise. Experts of transformers sort rows again, not stably, and then sum in another order.
    """
    near = 1e-6 if in_order else 1e-5
    for one, other in zip(plain, moved, strict=True):
        assert other.is_same
        assert one.losses == pytest.approx(other.losses, rel=near / 10)
        assert one.state.keys() == other.state.keys()
        for key, each in one.state.items():
            error = (each - other.state[key]).abs().max()
            assert error <= near * each.abs().max(), key


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        ("ours like deepseek", "adamw"),
        ("mixtral", "sgd"),
        ("deepseek-v3", "adamw"),
        pytest.param("ours like deepseek", "sgd", marks=pytest.mark.whole),
        pytest.param("mixtral", "adamw", marks=pytest.mark.whole),
        pytest.param("deepseek-v3", "sgd", marks=pytest.mark.whole),
    ],
)
def test_neither_losses_nor_weights_nor_state_show_that_experts_moved(two: Ranks, model: str, optimizer: str) -> None:
    plain = two.run(training.train, model, "dp=2,ep=2", optimizer, "not", timeout_seconds=120)
    moved = two.run(training.train, model, "dp=2,ep=2", optimizer, "swap", timeout_seconds=120)
    unnoticed(plain, moved, in_order=model.startswith("ours"))
    assert moved[0].placements != plain[0].placements
    assert moved[0].move_bytes > 0 == plain[0].move_bytes
    assert plain[0].losses[0] > plain[0].losses[-1]


# 6 experts on 4 ranks, and 8 on two pairs of ranks that have the same.
@pytest.mark.parametrize(
    ("model", "plan"),
    [pytest.param("qwen3-moe", "dp=4,ep=4", marks=pytest.mark.whole), ("ours like mixtral", "dp=4,ep=2")],
)
def test_experts_are_placed_by_the_load_that_was_measured(four: Ranks, model: str, plan: str) -> None:
    plain = four.run(training.train, model, plan, "adamw", "not", timeout_seconds=120)
    moved = four.run(training.train, model, plan, "adamw", "by load", timeout_seconds=120)
    unnoticed(plain, moved, in_order=model.startswith("ours"))
    for each in moved:
        assert any(each.moved.values())
        assert each.placements == moved[0].placements
        for name, load in each.loads.items():
            if each.moved.get(name):
                assert each.placements[name].peak(load) < plain[0].placements[name].peak(load)


def test_each_state_that_has_an_entry_for_every_expert_moves(two: Ranks) -> None:
    # Adafactor keeps a sum for each row and each column of every expert.
    for each in two.run(training.train, "ours like mixtral", "dp=2,ep=2", "adafactor", "swap", 3):
        kept = {key.partition(" ")[2] for key in each.state if "experts" in key}
        assert kept == {"", "row_var", "col_var"}
        assert each.is_same


def test_a_move_sends_the_experts_that_leave_with_two_moments_each(two: Ranks) -> None:
    # Reversed, all 4 experts of a rank leave: 3 matrices of 32 x 16 in each of 2 layers; weights, gradients, moments.
    for each in two.run(training.train, "ours like mixtral", "dp=2,ep=2", "adamw", "swap", timeout_seconds=120):
        assert each.move_bytes == 2 * 4 * 3 * (32 * 16) * 4 * (1 + 1 + 2)


def test_moves_that_cannot_be_are_refused(two: Ranks) -> None:
    with pytest.raises(ShardwiseError, match=r"has \(4, 4\) experts on its ranks, and would have \(1, 7\)"):
        two.run(training.with_other_sizes)
    with pytest.raises(ShardwiseError, match=r"unknown layer of experts 'layers\.0\.mlp\.expert'"):
        two.run(training.with_an_unknown_layer)


def test_placements_have_every_expert_once() -> None:
    with pytest.raises(ShardwiseError, match="every expert once") as caught:
        Placement(((0, 1), (1, 2)))
    assert caught.value.remedy == "Placement.even(3, 2)"
