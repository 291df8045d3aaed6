"""Small microbatches over two places of the CPU, one thread each: how many times as fast as one place.

8 encoder layers of width 384 and a batch of 16 x 128 tokens in 8 microbatches, fp32. One place goes through the same
microbatches, one after the other. The rows take turns, so that whoever else uses the machine slows all of them; the
shortest of each counts, and the seconds of the processor are shown beside it. `halves` is what the machine itself
allows: two threads with half of the layers each, which wait for nobody. Two cores that share their memory are not
always twice one, so the bound of a schedule is that row and the schedule's bubble.

    python benchmarks/placing_small.py        under 2 minutes on 2 cores
"""

import argparse
import sys
import threading
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter, process_time

import torch
from record import record
from torch import Tensor, nn

import shardwise as sw

MICROBATCHES, LEAST_SPEEDUP, MOST_DIFFERENCE = 8, 1.6, 1e-5


def make_layers(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True) for _ in range(count)]
    return nn.Sequential(*layers)


def one_after_the_other(module: nn.Module, batch: Tensor) -> float:
    """Forward and backward of each microbatch; the mean loss."""
    total = 0.0
    for rows in batch.chunk(MICROBATCHES):
        loss = module(rows).square().mean() / MICROBATCHES
        loss.backward()
        total += loss.item()
    return total


def at_once(module: nn.Module, batch: Tensor) -> float:
    loss = module(batch).square().mean()
    loss.backward()
    return float(loss.detach())


def two_halves(halves: list[nn.Sequential], batch: Tensor) -> float:
    def run(half: nn.Sequential) -> None:
        torch.set_num_threads(1)
        one_after_the_other(half, batch.clone().requires_grad_())

    threads = [threading.Thread(target=run, args=(half,)) for half in halves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=5, help="how many times each row is run")
    parser.add_argument("--schedules", default="1f1b,zb-h1,interleaved,zb-v", help="names, with commas between them")
    given = parser.parse_args()
    torch.set_num_threads(1)
    batch = torch.randn(16, 128, 384, generator=torch.Generator().manual_seed(1))
    whole, halves = make_layers(8), [make_layers(4), make_layers(4)]
    rows: dict[str, Callable[[], float]] = {
        "one": lambda: one_after_the_other(whole, batch),
        "halves": lambda: two_halves(halves, batch),
    }
    for schedule in given.schedules.split(","):
        placed = sw.place(
            make_layers(8),
            devices=["cpu:0", "cpu:1"],
            microbatches=MICROBATCHES,
            schedule=schedule,
            through_blocks=True,
        )
        rows[schedule] = partial(at_once, placed, batch)
    losses = {name: run() for name, run in rows.items()}
    wall: dict[str, list[float]] = {name: [] for name in rows}
    processor: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(given.turns):
        for name, run in rows.items():
            start, used = perf_counter(), process_time()
            run()
            wall[name].append(perf_counter() - start)
            processor[name].append(process_time() - used)
    results = {}
    for name in rows:
        results[name] = {
            "shortest_seconds": min(wall[name]),
            "median_seconds": median(wall[name]),
            "processor_seconds": median(processor[name]),
            "times_one": min(wall["one"]) / min(wall[name]),
            "median_times_one": median(a / b for a, b in zip(wall["one"], wall[name], strict=True)),
        }
        print(name, *(f"{key} {value:.3f}" for key, value in results[name].items()), sep="  ", flush=True)
    ours = [name for name in rows if name not in ("one", "halves")]
    best = max(results[name]["times_one"] for name in ours)
    same = all(abs(losses[name] - losses["one"]) <= MOST_DIFFERENCE * losses["one"] for name in ours)
    print(f"best: {best:.3f} x one place (at least {LEAST_SPEEDUP}); the same losses: {same}")
    record("placing_small", {"rows": results, "best": best, "least": LEAST_SPEEDUP, "same_losses": same})
    return int(best < LEAST_SPEEDUP or not same)


if __name__ == "__main__":
    sys.exit(main())
