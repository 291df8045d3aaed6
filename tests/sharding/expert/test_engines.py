"""Experts of an engine move during training, whatever ZeRO has cut, and neither loss nor state shows it."""

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from shardwise.ranks.spawn import Ranks
from tests.sharding.expert import engines


def check_unnoticed(
    ranks: Ranks, plan: str, optimizer: str, change: Callable[[nn.Module], nn.Module] = engines.as_it_is
) -> None:
    plain = ranks.run(engines.train, plan, optimizer, False, change, timeout_seconds=120)
    moved = ranks.run(engines.train, plan, optimizer, True, change, timeout_seconds=120)
    assert any(each.moved for each in moved), "nothing has moved, so nothing is shown"
    for one, other in zip(plain, moved, strict=True):
        assert other.losses == pytest.approx(one.losses, rel=1e-6)
        assert one.states.keys() == other.states.keys()
        for mine, theirs in ((one.weights, other.weights), (one.states, other.states)):
            for name, each in mine.items():
                if isinstance(each, Tensor):
                    assert float((theirs[name] - each).norm()) <= 1e-5 * float(each.norm()), name


@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [("dp=2,ep=2", "adamw"), ("dp=2,ep=2,zero=1", "adafactor"), ("cp=2,ep=2,zero=3", "adamw")],
)
def test_two_ranks_do_not_notice_that_experts_moved(two: Ranks, plan: str, optimizer: str) -> None:
    check_unnoticed(two, plan, optimizer)


@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [
        ("dp=4,ep=2,zero=2", "adamw"),
        pytest.param("dp=2,pp=2,ep=2,microbatches=2,zero=1", "adamw", marks=pytest.mark.whole),
        pytest.param("dp=2,tp=2,ep=2", "adafactor", marks=pytest.mark.whole),
        # The model is held twice: both copies of a layer see half of the microbatches, and are placed alike.
        pytest.param("dp=2,pp=2,ep=2,schedule=dualpipe,microbatches=4", "adamw", marks=pytest.mark.whole),
    ],
)
def test_four_ranks_do_not_notice_that_experts_moved(four: Ranks, plan: str, optimizer: str) -> None:
    check_unnoticed(four, plan, optimizer)


@pytest.mark.parametrize(
    ("plan", "change"),
    [
        ("dp=2,ep=2,precision=bf16,zero=1", engines.in_halves),
        pytest.param("dp=2,ep=2,zero=3", engines.half_frozen, marks=pytest.mark.whole),
        ("dp=2,ep=2", engines.half_frozen),
    ],
)
def test_masters_and_frozen_weights_go_along(two: Ranks, plan: str, change: Callable[[nn.Module], nn.Module]) -> None:
    check_unnoticed(two, plan, "adamw", change)


def test_an_optimizer_that_looks_at_whole_matrices_sees_the_experts_of_all_ranks(two: Ranks) -> None:
    # Adafactor goes by the size of a whole parameter, and that has all experts.
    apart, together = (two.run(engines.train, plan, "adafactor", False)[0] for plan in ("dp=2,ep=2", "dp=2"))
    for name, each in together.weights.items():
        assert float((apart.weights[name] - each).norm()) <= 1e-5 * float(each.norm()), name
