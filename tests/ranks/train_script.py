"""A script as a user would write one. It runs alone, under torchrun, and (with --spawn) starts its ranks itself."""

import sys

import torch
from torch.nn.functional import cross_entropy

import shardwise as sw
from tests.stages.pieces import Net


def loss(output, batch):  # type: ignore[no-untyped-def]
    return cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def main() -> list[float]:
    torch.set_num_threads(1)
    ids = torch.randint(0, 11, (8, 6), generator=torch.Generator().manual_seed(0))
    batch = {"ids": ids[:, :-1], "labels": ids[:, 1:]}
    engine = sw.parallelize(
        Net(num_blocks=4),
        "pp=2,schedule=zb-v,microbatches=4",
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        example=batch,
        clip=1.0,
    )
    return [engine.train_step(batch) for _ in range(3)]


if __name__ == "__main__":
    for losses in sw.spawn(main, devices=2) if "--spawn" in sys.argv else [main()]:
        # One write, so that two ranks do not print into each other's line.
        sys.stdout.write(" ".join(map(float.hex, losses)) + "\n")
