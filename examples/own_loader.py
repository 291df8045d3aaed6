"""A DataLoader with a DistributedSampler, as for DDP: torchrun --nproc-per-node 2 examples/own_loader.py dp=2"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shardwise as sw


def main(plan):
    torch.manual_seed(0)  # The same weights and data on every rank.
    inputs = torch.randn(320, 16)
    data = TensorDataset(inputs, (inputs @ torch.randn(16, 4)).argmax(1))
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))

    # Ranks of one replica load the same rows: with pp=2 there is one replica, with dp=2 there are two.
    index, count = sw.replica_of(plan)
    sampler = DistributedSampler(data, num_replicas=count, rank=index, seed=7)
    loader = DataLoader(data, batch_size=64 // count, sampler=sampler)
    batches = ({"input": rows, "labels": labels} for rows, labels in loader)

    engine = sw.parallelize(
        model, plan, batch="local",
        loss=lambda output, batch: nn.functional.cross_entropy(output, batch["labels"]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        example=dict(zip(("input", "labels"), data[: 64 // count], strict=True)),
    )  # fmt: skip
    for step, batch in enumerate(batches):
        loss = engine.train_step(batch)  # Of the rows of all replicas.
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            print(f"step {step}  loss {loss:.4f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "pp=2,microbatches=2")
