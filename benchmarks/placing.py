"""A model over two places of the CPU, one thread each, in one process: how many times as fast as one place.

The model is LLaMA-like (hidden 512, 8 layers, 8 heads, ffn 1376, vocabulary 8192), the batch 16 x 256 in 8
microbatches, fp32, AdamW. One place goes through the same microbatches, one after the other, with one thread. The
user's loss and optimizer are outside of the pipeline, in the caller's thread, and count. With 8 microbatches the bubble
allows 1.78.

    python benchmarks/placing.py        about 3 minutes on 2 cores

With a GPU: a model of which half has no room there, trained with the user's own optimizer. Its forward and backward
beside those of the model all on the GPU, and the bound: the larger of that and of its bytes over the link.

    python benchmarks/placing.py --host     under a minute on an H200
"""

import argparse
import json
import sys
from statistics import median
from time import perf_counter
from typing import Any

import torch
from llama import BATCH, LENGTH, Llama, a_batch
from record import record
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM

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


def make_large() -> LlamaForCausalLM:
    """12 layers of Llama-3B in bfloat16."""
    sizes = {"hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 8, "intermediate_size": 8192}
    config = LlamaConfig(**sizes, num_hidden_layers=12, vocab_size=32_000, use_cache=False)
    torch.manual_seed(0)
    with torch.device("cuda:0"):
        return LlamaForCausalLM(config).to(torch.bfloat16).train()


def timed_passes(model: nn.Module, ids: Tensor, num_steps: int) -> dict[str, Any]:
    """Medians of a forward with its backward, and of an update, to their ends; and the losses."""
    optimizer = AdamW(model.parameters(), lr=1e-5, fused=True)
    passes, updates, losses = [], [], []
    for _ in range(num_steps + 1):
        torch.cuda.synchronize()
        start = perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.cuda.synchronize()
        middle = perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        passes.append(middle - start)
        updates.append(perf_counter() - middle)
        losses.append(loss.item())
    return {"pass_seconds": median(passes[1:]), "update_seconds": median(updates[1:]), "losses": losses}


def beside_host(num_steps: int) -> dict[str, Any]:
    """Half of what the layers need is on the host, and streamed."""
    model = make_large()
    ids = torch.randint(0, 32_000, (8, 1024), device="cuda:0", generator=torch.Generator("cuda:0").manual_seed(0))
    whole = timed_passes(model, ids, num_steps)
    del model
    torch.cuda.empty_cache()
    model = make_large().cpu()
    weight_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
    layer_bytes = sum(each.numel() * each.element_size() for each in model.model.layers.parameters())
    room = 4 * (weight_bytes - layer_bytes // 2)
    placed = sw.place(model, ["cuda:0", "cpu"], budget={"cuda:0": room})
    on_host = sum(each.numel() * each.element_size() for each in placed.parameters() if not each.is_cuda)
    torch.cuda.reset_peak_memory_stats()
    ours = timed_passes(placed, ids, num_steps)
    pinned = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(pinned, device="cuda:0")
    seconds = []
    for _ in range(3):
        start = perf_counter()
        target.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(perf_counter() - start)
    link = 2**30 / median(seconds)
    bound = max(whole["pass_seconds"], 2 * on_host / link)
    return {
        "device": torch.cuda.get_device_name(),
        "weight_bytes": weight_bytes,
        "weight_bytes_on_host": on_host,
        "link_bytes_per_second": link,
        "all_on_the_gpu": whole,
        "streamed": ours,
        "pass_bound_seconds": bound,
        "of_bound": bound / ours["pass_seconds"],
        "tokens_per_second": ids.numel() / (ours["pass_seconds"] + ours["update_seconds"]),
        "largest_loss_difference": max(abs(a - b) for a, b in zip(whole["losses"], ours["losses"], strict=True)),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reason": placed.reason,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2, help="measured steps of each, of which the median counts")
    parser.add_argument(
        "--schedules", default="zb-h1,interleaved", help="names, with commas between them; the best one counts"
    )
    parser.add_argument("--host", action="store_true", help="a GPU and the host beside it, instead")
    given = parser.parse_args()
    if given.host:
        results = beside_host(given.steps)
        print(json.dumps(results, indent=2))
        record("placing_host", results)
        return 0
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
