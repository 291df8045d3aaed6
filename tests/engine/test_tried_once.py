"""One rank tries a loss and stages for all, unless ranks talk to each other in them: then all of them try."""

from ctypes import c_long
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.ranks.spawn import Ranks
from shardwise.stages.no_collectives import CollectiveMetError, NoCollectives

#: Numbers of C are not looked into, and so not put back.
NUM_FORWARDS = c_long(0)


class Counting(nn.Module):
    """Counts its forwards where nothing is put back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        NUM_FORWARDS.value += 1
        made: Tensor = self.second(self.first(x).tanh())
        return made


def quiet(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (output - batch["y"]).square().mean()


def talking(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Looks at a number of all ranks, as one does for a line in a log."""
    largest = output.detach().abs().max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    assert largest >= output.detach().abs().max()
    return quiet(output, batch)


def forwards_and_losses(plan: str, loss: Any) -> tuple[int, list[float]]:
    torch.manual_seed(0)
    module, batch = Counting(), {"x": torch.randn(8, 4), "y": torch.randn(8, 4)}
    NUM_FORWARDS.value = 0
    with sw.parallelize(
        module, plan, loss=loss, optimizer=lambda each: torch.optim.SGD(each, lr=0.1), example=batch, verify=True
    ) as engine:
        tried = NUM_FORWARDS.value
        return tried, [float(engine.train_step(batch)) for _ in range(2)]


@pytest.mark.parametrize("plan", ["dp=2", "pp=2,microbatches=2", "tp=2"])
def test_one_rank_tries_for_all(two: Ranks, plan: str) -> None:
    (first, losses), (second, others) = two.run(forwards_and_losses, plan, quiet)
    assert first > second + 3
    assert losses == others


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_all_try_where_ranks_talk_to_each_other(two: Ranks, plan: str) -> None:
    _, (quiet_forwards, quiet_losses) = two.run(forwards_and_losses, plan, quiet)
    (_, losses), (forwards, others) = two.run(forwards_and_losses, plan, talking)
    assert forwards > quiet_forwards + 3
    assert losses == others == quiet_losses


def test_a_collective_is_met_before_it_begins(two: Ranks) -> None:
    assert two.run(_meets) == [True, True]


def _meets() -> bool:
    number = torch.ones(())
    with pytest.raises(CollectiveMetError), NoCollectives():  # type: ignore[no-untyped-call]
        dist.all_reduce(number)
    return bool(number == 1)
