"""Batches that the microbatches do not divide, taken all the same: nothing is added to the loss or to a gradient."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

from shardwise.engine.parallelize import parallelize
from shardwise.ranks.spawn import Ranks
from shardwise.stages.batch import Padding, cut_batch
from shardwise.stages.stage import Batch
from tests.same import Trained, assert_same, train, train_plain
from tests.stages.pieces import Net

NUM_TOKENS = 11


def rows(size: int, seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(0, NUM_TOKENS, (size, 6), generator=torch.Generator().manual_seed(seed))
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


def sum_of(output: Tensor, batch: Batch) -> tuple[Tensor, int]:
    labels: Tensor = batch["labels"]
    return cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


def mean_of(output: Tensor, batch: Batch) -> Tensor:
    return cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def mean_over_rows(output: Tensor, batch: Batch) -> Tensor:
    """The same by hand: no labels are counted, and parts weigh as much as they have rows."""
    return -output.log_softmax(-1).gather(-1, batch["labels"].unsqueeze(-1)).mean()


@pytest.mark.parametrize(
    ("length", "count", "sizes"),
    [(8, 4, [2, 2, 2, 2]), (7, 4, [2, 2, 2, 1]), (5, 4, [2, 1, 1, 1]), (2, 4, [1, 1, 0, 0]), (1, 1, [1])],
)
def test_microbatches_have_all_rows_once_and_differ_by_one(length: int, count: int, sizes: list[int]) -> None:
    table = torch.zeros(3, 2)
    microbatches = cut_batch({"x": torch.arange(length), "table": table}, count, pad=True)
    real = [each for each in microbatches if not isinstance(each, Padding)]
    assert [0 if isinstance(each, Padding) else len(each["x"]) for each in microbatches] == sizes
    assert torch.cat([each["x"] for each in real]).tolist() == list(range(length))
    assert all(each["table"] is table for each in microbatches)
    assert all(each["x"].tolist() == [length - 1] for each in microbatches if isinstance(each, Padding))


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.1)


def trained(plan: str, loss: Any, sizes: list[int]) -> tuple[Trained, float]:
    """What training under a plan gives, and the loss of another batch afterwards."""
    torch.set_num_threads(1)
    engine = parallelize(Net(num_blocks=4), plan, loss=loss, optimizer=sgd, example=rows(sizes[0]), pad=True)
    with engine:
        return train(engine, [rows(size, seed) for seed, size in enumerate(sizes)]), engine.evaluate(rows(7))


@pytest.mark.parametrize(
    ("schedule", "loss"), [("1f1b", sum_of), ("1f1b", mean_of), ("1f1b", mean_over_rows), ("zb-v", mean_over_rows)]
)
def test_a_batch_of_any_size_trains_as_the_plain_module_does_on_all_of_it(schedule: str, loss: Any) -> None:
    sizes = [7, 3, 8, 1]
    net = Net(num_blocks=4)
    expected = train_plain(net, [rows(size, seed) for seed, size in enumerate(sizes)], loss, sgd)
    found, evaluated = trained(f"pp=2,microbatches=4,schedule={schedule}", loss, sizes)
    assert_same(found, expected, 1e-5)
    result = loss(net(rows(7)["ids"]), rows(7))
    mean = result[0] / result[1] if isinstance(result, tuple) else result
    assert evaluated == pytest.approx(float(mean.detach()), rel=1e-5)


def test_processes_do_the_same(two: Ranks) -> None:
    sizes = [7, 3, 8]
    expected, wanted = trained("pp=2,microbatches=4,schedule=zb-h1", sum_of, sizes)
    for found, evaluated in two.run(trained, "pp=2,microbatches=4,schedule=zb-h1", sum_of, sizes):
        assert_same(found, expected, is_part=True)
        assert evaluated == pytest.approx(wanted, rel=1e-6)
