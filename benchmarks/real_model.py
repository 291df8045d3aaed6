"""A real model in a pipeline of two CPU processes: tokens a second, ours beside torch.distributed.pipelining.

The model is LLaMA-like (hidden 512, 8 layers, 8 heads, ffn 1376, vocabulary 8192), the batch 16 x 256 in 8
microbatches, fp32, one thread a process, AdamW. Speeds are multiples of one thread alone. Two processes that have
nothing to do with each other say what the machine gives at most.

    python benchmarks/real_model.py                everything: about 15 minutes on 2 cores
    python benchmarks/real_model.py --quick        the best few
"""

import argparse
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from llama import BATCH, HIDDEN, LENGTH, Llama, LlamaPart, a_batch, token_loss
from record import record
from torch import Tensor
from torch.distributed import pipelining
from torch.optim import AdamW

from shardwise.engine.parallelize import parallelize
from shardwise.ranks.rank_error import RankError
from shardwise.ranks.spawn import Ranks

MICROBATCHES = 8
LEAST_RATIO = 1.02
OURS = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "auto"]
OUR_FEW = ["interleaved", "zb-h2", "auto"]
THEIRS = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2, "DualPipeV": 2}
THEIR_FEW = ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"]
#: Between blocks; through them, by FLOPs and bytes; through them, by what units take.
CUTS = ["blocks", "through", "measured"]
#: Layers of each stage, by the number of stages. torch gets both and its better one counts.
EVEN = {2: (4, 4), 4: (2, 2, 2, 2)}
LESS_BEFORE_THE_HEAD = {2: (5, 3), 4: (2, 2, 3, 1)}


def timed(step: Callable[[], object], num_steps: int) -> float:
    """Seconds of a step, the median; the first one is not counted."""
    step()
    times = []
    for _ in range(num_steps):
        if dist.is_initialized():
            dist.barrier()
        start = perf_counter()
        step()
        if dist.is_initialized():
            dist.barrier()
        times.append(perf_counter() - start)
    return median(times)


def alone(num_steps: int) -> float:
    """One thread, one process, in microbatches as well: larger ones leave the caches."""
    torch.set_num_threads(1)
    model = Llama()
    optimizer = AdamW(model.parameters(), foreach=True)
    batch = a_batch()

    def step() -> None:
        optimizer.zero_grad()
        ids, labels = batch["input_ids"].chunk(MICROBATCHES), batch["labels"].chunk(MICROBATCHES)
        for some, wanted in zip(ids, labels, strict=True):
            (token_loss(model(some), {"labels": wanted})[0] / (BATCH * LENGTH)).backward()
        optimizer.step()

    return timed(step, num_steps)


def ours(schedule: str, cut: str, num_steps: int) -> float:
    torch.set_num_threads(1)
    engine = parallelize(
        Llama(),
        f"pp=2,schedule={schedule},microbatches={MICROBATCHES}",
        loss=token_loss,
        optimizer=lambda parameters: AdamW(parameters, foreach=True),
        example=a_batch(),
        through_blocks=cut != "blocks",
        measure=cut == "measured",
    )
    batch = a_batch()
    seconds = timed(lambda: engine.train_step(batch), num_steps)
    engine.close()
    return seconds


def theirs(name: str, layers: tuple[int, ...], num_steps: int) -> float:
    torch.set_num_threads(1)
    rank, count = dist.get_rank(), len(layers)
    vee = name in ("ZBVZeroBubble", "DualPipeV")
    mine = [rank] if count == 2 else [rank, 3 - rank if vee else 2 + rank]
    ids = torch.zeros(BATCH // MICROBATCHES, LENGTH, dtype=torch.long)
    hidden = torch.zeros(BATCH // MICROBATCHES, LENGTH, HIDDEN, requires_grad=True)
    parts = [LlamaPart(layers, number) for number in mine]
    stages = [
        pipelining.PipelineStage(part, number, count, torch.device("cpu"), hidden if number else ids)
        for number, part in zip(mine, parts, strict=True)
    ]

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return token_loss(output, {"labels": labels})[0] / (BATCH * LENGTH)

    cls: Any = getattr(pipelining.schedules, f"Schedule{name}")
    schedule = cls(stages[0] if count == 2 else stages, MICROBATCHES, loss_fn=loss, scale_grads=False)
    optimizer = AdamW([each for part in parts for each in part.parameters()], foreach=True)
    batch = a_batch()

    def step() -> None:
        optimizer.zero_grad()
        given = (batch["input_ids"],) if 0 in mine else ()
        target = {"target": batch["labels"], "losses": []} if count - 1 in mine else {}
        schedule.step(*given, return_outputs=False, **target)
        optimizer.step()

    return timed(step, num_steps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="only the best few schedules")
    parser.add_argument("--ours", nargs="+", choices=OURS, help="only these of ours")
    parser.add_argument("--theirs", nargs="+", choices=THEIRS, help="only these of torch's")
    parser.add_argument("--cuts", nargs="+", choices=CUTS, default=CUTS, help="where ours are cut")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each, of which the median counts")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with Ranks(1) as one:
        base = one.run(alone, given.steps)[0]
    print(f"one thread: {BATCH * LENGTH / base:.1f} tokens/s", flush=True)

    def note(who: str, name: str, seconds: list[float], **more: Any) -> None:
        row = {"of": who, "schedule": name, "seconds": max(seconds), "times_one": base / max(seconds), **more}
        rows.append(row)
        print(f"{who:10} {name:22} {max(seconds):7.2f} s  {row['times_one']:.3f} x one thread {more or ''}", flush=True)

    with Ranks(2) as ranks:
        independent = max(ranks.run(alone, given.steps))
        print(f"two that have nothing to do with each other: {2 * base / independent:.3f} x", flush=True)
        for name in given.ours or (OUR_FEW if given.quick else OURS):
            for cut in given.cuts:
                note("shardwise", name, ranks.run(ours, name, cut, given.steps), cut=cut)
    for name in given.theirs or (THEIR_FEW if given.quick else THEIRS):
        for counts in (EVEN, LESS_BEFORE_THE_HEAD):
            layers = counts[2 * THEIRS[name]]
            # On ranks of their own: torch 2.11 cannot run all of its schedules over gloo, and takes connections along.
            try:
                with Ranks(2) as others:
                    note("torch", name, others.run(theirs, name, layers, given.steps), layers=layers)
            except RankError as error:
                print(f"{'torch':10} {name:22} {error.problem.partition(chr(10))[0]}", flush=True)
    best = {who: max(row["times_one"] for row in rows if row["of"] == who) for who in ("shardwise", "torch")}
    ratio = best["shardwise"] / best["torch"]
    print(f"best of ours over torch's best: {ratio:.4f} (at least {LEAST_RATIO})")
    record(
        "real_model",
        {
            "tokens_per_second_of_one_thread": BATCH * LENGTH / base,
            "two_independent": 2 * base / independent,
            "rows": rows,
            "best": best,
            "best_over_torch": ratio,
            "least": LEAST_RATIO,
        },
    )
    return int(ratio < LEAST_RATIO)


if __name__ == "__main__":
    sys.exit(main())
