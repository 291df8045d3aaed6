"""What an engine costs beside the computation: recording a trace, and agreeing on shapes that are new.

A LLaMA-like model (hidden 512, 8 layers, vocabulary 8192) in a pipeline of two CPU processes of one thread each, ZB-V,
8 microbatches. Three kinds of steps that compute the same take turns: plain ones; recorded ones; and ones whose batch
has an entry of a length that was never seen, so that every message is described anew. Of each kind the median counts.
The processor's own time is kept beside it: on a busy machine it is all that can be told.

    python benchmarks/engine_overhead.py                about 3 minutes on 2 quiet cores
"""

import sys
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from llama import VOCABULARY, Llama, token_loss
from record import record
from torch.optim import AdamW

from shardwise.engine.parallelize import parallelize
from shardwise.ranks.spawn import spawn

SIZE, LENGTH, MICROBATCHES = 8, 256, 8
ROUNDS = 12
MOST = {"trace": 0.01, "new shapes": 0.02}


def run() -> dict[str, list[tuple[float, float]]]:
    """One rank: seconds of each step and of the processor in it, by kind."""
    torch.set_num_threads(1)
    ids = torch.randint(0, VOCABULARY, (SIZE, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    batch: dict[str, Any] = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    engine = parallelize(
        Llama(),
        f"pp=2,schedule=zb-v,microbatches={MICROBATCHES}",
        loss=token_loss,
        optimizer=lambda parameters: AdamW(parameters, foreach=True),
        example=batch,
    )
    engine.train_step(batch, trace=True)
    seconds: dict[str, list[tuple[float, float]]] = {"plain": [], "trace": [], "new shapes": []}
    for number in range(ROUNDS):
        # Another goes first each time: what comes after another kind may be quicker or slower for it.
        for kind in [*seconds][number % 3 :] + [*seconds][: number % 3]:
            given = {**batch, "unseen": torch.zeros(SIZE + 1 + number)} if kind == "new shapes" else batch
            dist.barrier()
            start, start_of_processor = perf_counter(), process_time()
            engine.train_step(given, trace=kind == "trace")
            dist.barrier()
            seconds[kind].append((perf_counter() - start, process_time() - start_of_processor))
    engine.close()
    return seconds


def main() -> int:
    steps = spawn(run, devices=2)[0]
    wall, processor = ({kind: [each[clock] for each in steps[kind]] for kind in steps} for clock in (0, 1))
    plain = median(wall["plain"])
    # What lies between plain steps themselves: less than this cannot be told apart.
    spread = median(abs(each - plain) for each in wall["plain"]) / plain
    results: dict[str, object] = {"step_seconds": round(plain, 4), "spread_of_plain_steps": round(spread, 4)}
    is_right = True
    for kind, most in MOST.items():
        cost, used = (median(each[kind]) / median(each["plain"]) - 1 for each in (wall, processor))
        print(
            f"{kind}: {cost:+.2%} of a step of {plain:.3f} s, {used:+.2%} of the processor's time"
            f" (at most {most:.0%}; plain steps differ by {spread:.2%})"
        )
        name = kind.replace(" ", "_")
        results |= {f"cost_of_{name}": round(cost, 5), f"processor_cost_of_{name}": round(used, 5)}
        is_right &= cost <= most
    record("engine_overhead", results)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
