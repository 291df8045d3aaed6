"""Ranks as threads of one process: they meet in collectives, and none waits for one that went another way."""

import threading
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from shardwise.ranks.collectives import copy, gather, scatter, start_reduce_scatter, sum_over
from shardwise.ranks.simulated import SimulatedGroup, simulate


def test_collectives_are_those_of_processes() -> None:
    def run(group: SimulatedGroup) -> list[Tensor]:
        own = torch.arange(6.0).view(2, 3) + 10 * group.rank
        return [
            sum_over(own, group),
            gather(own, group, 1, used_alike=True),
            start_reduce_scatter(own, group, 1).finish(),
        ]

    whole = torch.arange(6.0).view(2, 3)
    for rank, (summed, gathered, scattered) in enumerate(simulate(3, run)):
        assert torch.equal(summed, 3 * whole + 30)
        assert torch.equal(gathered, torch.cat([whole, whole + 10, whole + 20], 1))
        assert torch.equal(scattered, (3 * whole + 30)[:, rank : rank + 1])


def test_ranks_meet_in_backwards_too() -> None:
    def run(group: SimulatedGroup) -> Tensor:
        given = torch.ones(4, requires_grad=True)
        (copy(given, group) * (group.rank + 1)).sum().backward()  # type: ignore[no-untyped-call]
        assert given.grad is not None
        return given.grad

    for gradient in simulate(2, run):
        assert torch.equal(gradient, torch.full((4,), 3.0))


def test_a_rank_that_fails_stops_the_others_and_its_error_is_raised() -> None:
    def run(group: SimulatedGroup) -> Tensor:
        if group.rank == 1:
            raise ValueError("a rank of its own mind")
        return sum_over(torch.ones(2), group)

    with pytest.raises(ValueError, match="a rank of its own mind"):
        simulate(3, run)


def test_ranks_that_go_different_ways_are_told_apart() -> None:
    def run(group: SimulatedGroup) -> Tensor:
        return sum_over(torch.ones(2), group) if group.rank else scatter(torch.ones(2), group, 0)

    with pytest.raises(RuntimeError, match="ranks went different ways: the end, all_reduce"):
        simulate(2, run)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # Of torch's own, at its first derivative.
def test_ranks_take_turns_as_forward_mode_derivatives_have_one_level_for_the_process() -> None:
    both_are_inside = threading.Barrier(2)

    def run(group: SimulatedGroup) -> Tensor:
        def squared(x: Tensor) -> Tensor:
            # Where ranks run at a time both come here, and the second has no level of its own.
            with suppress(threading.BrokenBarrierError):
                both_are_inside.wait(0.1)
            return x * x

        primal, tangent = torch.func.jvp(squared, (torch.ones(2),), (torch.ones(2),))
        return sum_over(primal + tangent, group)

    for made in simulate(2, run):
        assert torch.equal(made, torch.full((2,), 6.0))
    assert both_are_inside.broken
