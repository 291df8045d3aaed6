"""The executor of one process defines what a schedule means: the plain module's gradients, whatever the order."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from shardwise.execution.local import LocalExecutor
from shardwise.execution.pipeline import complete, forward_only
from shardwise.schedule.catalogue import CATALOGUE, make_schedule
from shardwise.stages.batch import cut_batch
from shardwise.stages.stage import Batch
from tests.stages.pieces import Net, cut_by_hand

SYNCHRONOUS = [name for name in CATALOGUE if name != "pipedream-2bw"]


def loss(output: Tensor, batch: Batch) -> tuple[Tensor, int]:
    labels: Tensor = batch["labels"]
    return cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


def a_batch(length: int, size: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, 11, (size, length + 1), generator=generator)
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


def plain_gradients(net: Net, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    net.zero_grad()
    total, count = loss(net(batch["ids"]), batch)
    (total / count).backward()  # type: ignore[no-untyped-call]
    gradients = {name: each.grad.clone() for name, each in net.named_parameters() if each.grad is not None}
    net.zero_grad()
    return float(total.detach()) / count, gradients


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_every_schedule_gives_the_gradients_of_the_plain_module(name: str, num_ranks: int) -> None:
    schedule = make_schedule(name, num_ranks, 8)
    net = Net(len(schedule.placement.pipes[0])).double()
    split = cut_by_hand(net)
    executor = LocalExecutor(complete(schedule, split), split, loss)
    for length in (5, 7):  # A sequence length that changes between steps is nothing special.
        batch = a_batch(length)
        expected_loss, expected = plain_gradients(net, batch)
        tally = executor.run(cut_batch(batch, 8))
        assert tally.total / tally.count == pytest.approx(expected_loss, rel=1e-6)
        for parameter, gradient in expected.items():
            found = dict(net.named_parameters())[parameter].grad
            assert found is not None, parameter
            torch.testing.assert_close(found / tally.count, gradient, rtol=1e-9, atol=1e-12, msg=parameter)
        net.zero_grad()


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_evaluation_runs_the_forwards_alone(name: str) -> None:
    schedule = make_schedule(name, 2, 4)
    net = Net(len(schedule.placement.pipes[0])).double()
    split = cut_by_hand(net)
    executor = LocalExecutor(forward_only(complete(schedule, split)), split, loss)
    batch = a_batch(6, size=4)
    expected, _ = plain_gradients(net, batch)
    for _ in range(2):
        with torch.no_grad():
            tally = executor.run(cut_batch(batch, 4))
        assert tally.total / tally.count == pytest.approx(expected, rel=1e-6)
