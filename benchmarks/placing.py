"""A model over two places of the CPU, one thread each, in one process: how many times as fast as one place.

The model is LLaMA-like (hidden 512, 8 layers, 8 heads, ffn 1376, vocabulary 8192), the batch 16 x 256 in 8
microbatches, fp32, AdamW. One place goes through the same microbatches, one after the other, with one thread. The
user's loss and optimizer are outside of the pipeline, in the caller's thread, and count. With 8 microbatches the bubble
allows 1.78.

    python benchmarks/placing.py        about 3 minutes on 2 cores
"""

import argparse
import sys
from statistics import median
from time import perf_counter

import torch
from llama import BATCH, LENGTH, Llama, a_batch
from record import record
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

import shardwise as sw

MICROBATCHES = 8
LEAST_SPEEDUP = 1.6
MOST_DIFFERENCE = 1e-4


def mean_loss(output: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, 1), labels.flatten())


def one_place(num_steps: int) -> tuple[list[float], list[float]]:
    """Losses and seconds of each step."""
    model, batch = Llama(), a_batch()
    optimizer = AdamW(model.parameters(), lr=1e-3, foreach=True)
    losses, seconds = [], []
    for _ in range(num_steps):
        start, total = perf_counter(), 0.0
        optimizer.zero_grad()
        ids, labels = batch["input_ids"].chunk(MICROBATCHES), batch["labels"].chunk(MICROBATCHES)
        for some, wanted in zip(ids, labels, strict=True):
            loss = mean_loss(model(some), wanted) / MICROBATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
        seconds.append(perf_counter() - start)
    return losses, seconds


def two_places(schedule: str, num_steps: int) -> tuple[list[float], list[float]]:
    """Losses and seconds of each step."""
    batch = a_batch()
    model = sw.place(
        Llama(),
        devices=["cpu:0", "cpu:1"],
        microbatches=MICROBATCHES,
        schedule=schedule,
        example={"input_ids": batch["input_ids"]},
        through_blocks=True,
    )
    optimizer = AdamW(model.parameters(), lr=1e-3, foreach=True)
    losses, seconds = [], []
    for _ in range(num_steps):
        start = perf_counter()
        optimizer.zero_grad()
        loss = mean_loss(model(batch["input_ids"]), batch["labels"])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(perf_counter() - start)
    return losses, seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2, help="measured steps of each, of which the median counts")
    parser.add_argument(
        "--schedules", default="zb-h1,interleaved", help="names, with commas between them; the best one counts"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    losses, seconds = one_place(given.steps + 1)
    base = median(seconds[1:])
    print(f"one place: {base:.2f} s a step, {BATCH * LENGTH / base:.1f} tokens/s, losses {losses}", flush=True)
    rows = []
    for schedule in given.schedules.split(","):
        ours, times = two_places(schedule, given.steps + 1)
        difference = max(abs(one - other) for one, other in zip(losses, ours, strict=True))
        row = {"schedule": schedule, "seconds": median(times[1:]), "loss_difference": difference}
        row["times_one"] = base / median(times[1:])
        rows.append(row)
        print(f"two places, {schedule}: {median(times[1:]):.2f} s, {row['times_one']:.3f} x, losses {ours}", flush=True)
    best = max(float(row["times_one"]) for row in rows)
    same = all(float(row["loss_difference"]) <= MOST_DIFFERENCE for row in rows)
    print(f"best: {best:.3f} x one place (at least {LEAST_SPEEDUP}); the same losses: {same}")
    record(
        "placing",
        {
            "seconds_of_one_place": base,
            "tokens_per_second_of_one_place": BATCH * LENGTH / base,
            "losses_of_one_place": losses,
            "rows": rows,
            "best": best,
            "least": LEAST_SPEEDUP,
            "same_losses": same,
        },
    )
    return int(best < LEAST_SPEEDUP or not same)


if __name__ == "__main__":
    sys.exit(main())
