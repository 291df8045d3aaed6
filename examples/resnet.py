"""A module without a list of blocks: the ResNet-50 of the tests, cut where its time is even, on two ranks in a V."""

import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import shardwise as sw

sys.path.append(str(Path(__file__).parents[1]))
from tests.stages.nets import ResNet50

torch.manual_seed(0)
batch = {"image": torch.randn(16, 3, 64, 64), "label": torch.randint(0, 10, (16,))}
engine = sw.parallelize(
    ResNet50(width=8, num_classes=10),
    "pp=2,schedule=zb-v,microbatches=4",
    loss=lambda output, batch: cross_entropy(output, batch["label"]),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    example=batch,
)
for units in engine.split.units:
    print(f"a stage of {len(units)} units: {units[0]} to {units[-1]}")
for step in range(5):
    print(f"step {step}  loss {engine.train_step(batch):.4f}")
