"""The executor of one process defines what a schedule means: the plain module's gradients, whatever the order."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from shardwise.execution.local import LocalExecutor
from shardwise.execution.pipeline import complete, forward_only
from shardwise.schedule.catalogue import CATALOGUE, make_schedule
from shardwise.stages.batch import cut_batch
from shardwise.stages.stage import Batch
from tests.same import gradients_of, train_plain, worst
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
    found = train_plain(net, [batch], loss, lambda parameters: SGD(parameters, lr=0.0))
    net.zero_grad()
    return found.losses[0], dict(found.gradients)


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
        found = {name: each / tally.count for name, each in gradients_of(dict(net.named_parameters())).items()}
        error, name = worst(found, expected)
        assert error <= 1e-9, name
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
