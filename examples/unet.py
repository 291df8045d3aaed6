"""Skips over stages: the U-Net of the tests learns to see the noise in an image, and its step is drawn."""

import sys
from pathlib import Path

import torch
from torch.nn.functional import mse_loss

import shardwise as sw
from shardwise.trace.timeline import draw

sys.path.append(str(Path(__file__).parents[1]))
from tests.stages.nets import UNet

torch.manual_seed(0)
noise, moment = torch.randn(16, 3, 16, 16), torch.rand(16)
weight = moment[:, None, None, None]
batch = {"image": (1 - weight) * 0.5 + weight * noise, "moment": moment, "noise": noise}
engine = sw.parallelize(
    UNet(),
    "pp=3,schedule=1f1b,microbatches=4,recompute=full",
    loss=lambda output, batch: mse_loss(output["noise"], batch["noise"]),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    example=batch,
)
print("skips, from stage to stage:", [edge for edge in engine.split.edges if edge[1] - edge[0] > 1])
for step in range(5):
    print(f"step {step}  loss {engine.train_step(batch, trace=step == 4):.4f}")
print(*draw(engine.trace, width=120), sep="\n")
