"""Trains under `torchrun` until the second rank's metrics raise."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw

batch = {"input": torch.ones(4, 4)}
engine = sw.parallelize(
    nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "dp=2", loss=lambda output, _: output.square().mean(),
    optimizer=partial(torch.optim.SGD, lr=0.1), example=batch,
)  # fmt: skip
engine.train_step(batch)


def fail(output: Any, batch: Any) -> dict[str, float]:
    del output, batch
    if dist.get_rank() == 1:
        raise ValueError("the second rank has enough")
    return {}


engine.train_step(batch, metrics=fail)
