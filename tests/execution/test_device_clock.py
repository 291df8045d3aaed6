"""On a GPU, a trace has the device's times: the host is done with a step long before the device is."""

from collections.abc import Iterable
from time import perf_counter

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from shardwise.engine.parallelize import parallelize
from shardwise.stages.stage import Batch
from shardwise.trace.events import Lane
from shardwise.trace.stretches import Part, parts_of_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WIDTH = 4096


def squared(output: Tensor, batch: Batch) -> Tensor:  # noqa: ARG001 - there are no labels
    return output.square().mean()


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=1e-6)


def test_most_of_a_step_of_large_matmuls_is_compute() -> None:
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8))).cuda()
    batch = {"input": torch.randn(WIDTH, WIDTH, device="cuda")}
    engine = parallelize(module, "dp=1,microbatches=2", loss=squared, optimizer=sgd, example=batch)
    for _ in range(3):
        engine.train_step(batch)
    torch.cuda.synchronize()
    start = perf_counter()
    engine.train_step(batch, trace=True)
    torch.cuda.synchronize()
    took = perf_counter() - start
    trace = engine.trace
    assert trace is not None
    (parts,) = parts_of_ranks(trace)
    assert sum(parts.values()) == pytest.approx(trace.makespan, rel=0.01)
    assert trace.makespan <= took
    assert parts[Part.COMPUTE] > 0.7 * trace.makespan
    forwards = [event.seconds for event in trace.events if event.lane is Lane.COMPUTE and "F" in event.name]
    backwards = [event.seconds for event in trace.events if event.lane is Lane.COMPUTE and "B" in event.name]
    # A backward is two products of matrices for each of a forward's.
    assert 1.3 < sum(backwards) / sum(forwards) < 3.0
