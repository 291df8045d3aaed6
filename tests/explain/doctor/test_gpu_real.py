"""Faults made on purpose in real steps of a GPU: the doctor finds each in what the device was seen to do."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from shardwise.engine.parallelize import parallelize
from shardwise.execution.collector import StreamCollector
from shardwise.explain.doctor.examine import examine
from shardwise.stages.stage import Batch
from shardwise.trace.run import Run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

OF_DEVICES = {"host bound", "tiny kernels", "pageable copies", "exposed copies", "late stream"}


def squared(output: Tensor, batch: Batch) -> Tensor:  # noqa: ARG001 - there are no labels
    return output.square().mean()


def late_host(*_: Any) -> None:
    torch.cuda.synchronize()
    time.sleep(0.02)


def tiny_kernels(small: Tensor, *_: Any) -> None:
    for _number in range(400):
        small.add_(1.0)


def copied(host: Tensor, device: Tensor, *_: Any) -> None:
    device.copy_(host, non_blocking=True)


def side_stream(side: torch.cuda.Stream, matrix: Tensor, *_: Any) -> None:
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.mm(matrix, matrix)
    torch.cuda.current_stream().wait_stream(side)


def faults() -> dict[str, tuple[int, Callable[..., None]]]:
    """For each word of the doctor's, how wide the layers are, and what is done before each of them."""
    pageable = torch.zeros(2**25)
    large = torch.zeros(2**25, device="cuda")
    pinned = torch.zeros(2**26).pin_memory()
    larger = torch.zeros(2**26, device="cuda")
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return {
        "host bound": (4096, late_host),
        "tiny kernels": (64, partial(tiny_kernels, torch.zeros(16, device="cuda"))),
        "pageable copies": (4096, partial(copied, pageable, large)),
        "exposed copies": (2048, partial(copied, pinned, larger)),
        "late stream": (2048, partial(side_stream, side, torch.zeros(4096, 4096, device="cuda"))),
    }


def findings(width: int, before: Callable[..., None] | None) -> list[str]:
    module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8))).cuda()
    batch = {"input": torch.randn(width, width, device="cuda")}
    engine = parallelize(module, "dp=1", loss=squared, optimizer=lambda each: SGD(each, lr=1e-6), example=batch)
    if before is not None:
        for layer in module:
            layer.register_forward_pre_hook(before)
    for _ in range(3):
        streams = StreamCollector(torch.device("cuda", torch.cuda.current_device()))
        streams.start()
        engine.train_step(batch, trace=True, streams=streams)
    trace = engine.trace
    engine.close()
    assert trace is not None
    return [each.kind for each in examine(Run(name="a fault", trace=trace))]


@pytest.mark.parametrize("kind", sorted(OF_DEVICES))
def test_a_fault_made_on_purpose_is_found(kind: str) -> None:
    width, before = faults()[kind]
    assert kind in findings(width, before)


def test_nothing_is_said_of_large_products_alone() -> None:
    assert OF_DEVICES.isdisjoint(findings(8192, None))
