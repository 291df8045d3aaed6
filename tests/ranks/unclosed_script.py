"""A script that ends without `engine.close()`, under tp=2; or whose last rank is gone as soon as it has trained."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import shardwise as sw
from shardwise.ranks.faults import Watch

if __name__ == "__main__":
    # Twice a second the end of a script seldom meets it.
    Watch.__init__.__kwdefaults__["beat_seconds"] = 0.0  # type: ignore[index]
    torch.set_num_threads(1)
    batch = {"input": torch.ones(4, 8), "target": torch.zeros(4, 8)}
    engine = sw.parallelize(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)),
        "tp=2",
        loss=lambda output, batch: mse_loss(output, batch["target"]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
        example=batch,
    )
    engine.train_step(batch)
    sys.stdout.write("trained\n")
    sys.stdout.flush()
    if sys.argv[1] == "one is gone" and dist.get_rank() == 1:
        os._exit(0)
