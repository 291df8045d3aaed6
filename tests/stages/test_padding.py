"""Batches that the microbatches do not divide, taken all the same: nothing is added to the loss or to a gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from shardwise.engine.parallelize import parallelize
from shardwise.ranks.spawn import Ranks
from shardwise.stages.batch import Padding, cut_batch
from shardwise.stages.stage import Batch
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


def train(plan: str, loss: Any, sizes: list[int]) -> tuple[list[float], dict[str, Tensor], float]:
    torch.set_num_threads(1)
    engine = parallelize(
        Net(num_blocks=4),
        plan,
        loss=loss,
        optimizer=lambda parameters: SGD(parameters, lr=0.1),
        example=rows(sizes[0]),
        pad=True,
    )
    losses = [engine.train_step(rows(size, seed)) for seed, size in enumerate(sizes)]
    state = {name: each.clone() for name, each in engine.state_dict().items()}
    evaluated = engine.evaluate(rows(7))
    engine.close()
    return losses, state, evaluated


def plainly(loss: Any, sizes: list[int]) -> tuple[list[float], dict[str, Tensor], float]:
    net = Net(num_blocks=4)
    optimizer = SGD(net.parameters(), lr=0.1)

    def mean(batch: Batch) -> Tensor:
        result = loss(net(batch["ids"]), batch)
        return result[0] / result[1] if isinstance(result, tuple) else result  # type: ignore[no-any-return]

    losses = []
    for seed, size in enumerate(sizes):
        optimizer.zero_grad()
        value = mean(rows(size, seed))
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(value.item())
    return losses, net.state_dict(), mean(rows(7)).item()


@pytest.mark.parametrize("loss", [sum_of, mean_of])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_batch_of_any_size_trains_as_the_plain_module_does_on_all_of_it(loss: Any, schedule: str) -> None:
    sizes = [7, 3, 8, 1]
    expected = plainly(loss, sizes)
    found = train(f"pp=2,microbatches=4,schedule={schedule}", loss, sizes)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[2] == pytest.approx(expected[2], rel=1e-5)
    assert all(torch.allclose(each, expected[1][name], rtol=1e-5, atol=1e-7) for name, each in found[1].items())


def test_processes_do_the_same(two: Ranks) -> None:
    sizes = [7, 3, 8]
    expected = train("pp=2,microbatches=4,schedule=zb-h1", sum_of, sizes)
    for losses, state, evaluated in two.run(train, "pp=2,microbatches=4,schedule=zb-h1", sum_of, sizes):
        assert losses == pytest.approx(expected[0], rel=1e-6)
        assert evaluated == pytest.approx(expected[2], rel=1e-6)
        assert all(torch.allclose(each, expected[1][name], rtol=1e-5, atol=1e-7) for name, each in state.items())
