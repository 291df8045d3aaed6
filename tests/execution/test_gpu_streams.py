"""On a GPU: what torch's profiler sees of a step is in its trace, stream by stream, and adds up to it."""

from collections.abc import Iterable
from time import perf_counter

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from shardwise.engine.parallelize import parallelize
from shardwise.execution.collector import StreamCollector
from shardwise.ranks.spawn import Ranks
from shardwise.stages.stage import Batch
from shardwise.trace.activities import ActivityKind
from shardwise.trace.events import Trace
from shardwise.trace.streams import seconds_by_word, streams_of_ranks
from shardwise.trace.stretches import Part, parts_of_ranks, stretches

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WIDTH = 2048


def squared(output: Tensor, batch: Batch) -> Tensor:  # noqa: ARG001 - there are no labels
    return output.square().mean()


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=1e-6)


def looked_at(plan: str, *, pinned: bool = True) -> tuple[Trace, float]:
    """A step, its batch copied to the GPU in it; and how long it took, by a clock outside of it."""
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8))).cuda()
    host = torch.randn(WIDTH, WIDTH)
    host = host.pin_memory() if pinned else host
    engine = parallelize(module, plan, loss=squared, optimizer=sgd, example={"input": host.cuda()})
    device = torch.device("cuda", torch.cuda.current_device())
    for _ in range(3):
        streams = StreamCollector(device)
        streams.start()
        start = perf_counter()
        batch = {"input": host.to(device, non_blocking=True)}
        engine.train_step(batch, trace=True, data_wait=perf_counter() - start, streams=streams)
    trace = engine.trace
    engine.close()
    assert trace is not None
    return trace, streams.ended - start


def test_the_parts_of_a_step_are_the_devices_and_add_up() -> None:
    trace, took = looked_at("dp=1,microbatches=2")
    (parts,) = parts_of_ranks(trace)
    assert sum(parts.values()) == pytest.approx(took, rel=0.02, abs=300e-6)
    assert parts[Part.COMPUTE] > 0
    (streams,) = streams_of_ranks(trace)
    assert streams[0].role == "compute"
    for use in streams:
        assert sum(use.seconds.values()) + use.idle_seconds == pytest.approx(trace.makespan, rel=1e-6)


def test_kernels_belong_to_the_instructions_that_launched_them() -> None:
    trace, _ = looked_at("dp=1,microbatches=2")
    kernels = [each for each in trace.activities if each.kind is ActivityKind.KERNEL]
    assert {"0F0", "0F1", "0B0", "0B1"} <= {each.instruction for each in kernels}
    assert all(each.launched is not None and each.launched <= each.start for each in kernels)
    begin, end = trace.windows[0]
    assert all(begin <= each.start <= each.end <= end for each in trace.activities)


@pytest.mark.parametrize("pinned", [True, False])
def test_the_copy_of_a_batch_is_seen_with_its_direction_and_memory(pinned: bool) -> None:
    trace, _ = looked_at("dp=1", pinned=pinned)
    copies = [each for each in trace.activities if each.kind is ActivityKind.HOST_TO_DEVICE]
    assert copies
    assert max(copies, key=lambda each: each.seconds).is_pageable is not pinned


def test_a_sum_over_replicas_is_seen_with_its_purpose_on_both() -> None:
    with Ranks(2, gpus="shared") as ranks:
        trace, _ = ranks.run(looked_at, "dp=2")[0]
    sums = [each for each in trace.activities if each.kind is ActivityKind.NCCL]
    assert {each.rank for each in sums} == {0, 1}
    # Which parameters had a gradient is summed too, and is no part of the model: nobody notes that.
    assert [each.rank for each in sums if not each.purpose] in ([0, 1], [1, 0])
    assert {each.purpose for each in sums} == {"", "a sum of gradients"}
    assert {each.group for each in sums if each.purpose} == {"0 1"}
    assert "NCCL all reduce" in seconds_by_word(trace.activities)
    on = {each.on for rank in stretches(trace) for each in rank if each.part is Part.EXPOSED}
    assert "a sum of gradients" in on
    for parts in parts_of_ranks(trace):
        assert sum(parts.values()) == pytest.approx(trace.makespan)
