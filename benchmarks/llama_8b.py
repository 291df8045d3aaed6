"""Full training of Llama-8B on one GPU, as much of its optimizer state on the host as there is no room for.

    python -m benchmarks.llama_8b [--rows 4] [--share 0.5] [--recompute selective]

bf16 weights computed with, AdamW in fp32 on masters in fp32: 16 bytes a weight, 128 GB without an activation. `--share`
of the optimizer state is on the host, and is updated there piece by piece beside the backward and the next forward.
Beside tokens a second stands the bound: the longer of

    compute    6 FLOPs a weight a token at 792 TFLOP/s, causal attention at 383: both measured on an H200
    link       masters and moments that live on the host, to the GPU and back, at the bytes/s measured in the same run

Asked are 85 % of it. Rows are of 4096 tokens.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

sys.path.insert(0, str(Path(__file__).parent))
from record import kept, record

import shardwise as sw
from shardwise.nets.loss import next_token_loss
from shardwise.nets.settings import Heads, Mlp, Settings
from shardwise.nets.transformer import Transformer

LENGTH, WARM, STEPS = 4096, 2, 4
SETTINGS = Settings(
    vocabulary=128_256,
    width=4096,
    num_layers=32,
    length=LENGTH,
    attention=Heads(num_heads=32, num_kv_heads=8, head_dim=128),
    mlp=Mlp(width=14_336),
)
PRODUCTS, ATTENTION, ASKED = 792e12, 383e12, 0.85
#: A master and two moments, in fp32.
STATE_BYTES = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.5, help="of the optimizer state, on the host")
    parser.add_argument("--recompute", default="selective", choices=("none", "selective", "full"))
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("one GPU is measured, and torch sees none")
        return
    found = trained(given.rows, given.share, given.recompute)
    print(json.dumps(found, indent=1), flush=True)
    name = f"{given.rows}x{LENGTH}, {given.share} on the host, recompute={given.recompute}"
    record("llama_8b", {**kept("llama_8b"), "device": torch.cuda.get_device_name(), name: found})


def trained(rows: int, share: float, recompute: str) -> dict[str, Any]:
    link = link_speed()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        module = Transformer(SETTINGS)
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for each in module.parameters():
            each.normal_(0, 0.02) if each.dim() > 1 else each.fill_(1)
    weights, batch = sum(each.numel() for each in module.parameters()), tokens(rows)
    plan = f"precision=bf16,offload.optimizer={share},recompute={recompute}"
    engine = sw.parallelize(
        module, plan, loss=next_token_loss, optimizer=partial(AdamW, lr=1e-5, fused=True), example=batch, compile=True
    )
    begun = perf_counter()
    for _ in range(WARM):
        loss = engine.train_step(batch)
    torch.cuda.synchronize()
    warm = perf_counter() - begun
    torch.cuda.reset_peak_memory_stats()
    begun = perf_counter()
    for _ in range(STEPS):
        loss = engine.train_step(batch)
    torch.cuda.synchronize()
    seconds = (perf_counter() - begun) / STEPS
    bounds = bound_seconds(weights, rows, share, link)
    bound = max(bounds.values())
    return {
        "plan": plan,
        "tokens_per_second": round(rows * LENGTH / seconds),
        "bound_tokens_per_second": round(rows * LENGTH / bound),
        "share_of_bound": round(bound / seconds, 3),
        "asked": ASKED,
        "step_seconds": round(seconds, 3),
        "bound_seconds": {name: round(each, 3) for name, each in bounds.items()},
        "link_gb_per_second": round(link / 1e9, 1),
        "gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "host_gb": round(engine.host_bytes / 1e9, 1),
        "warm_seconds": round(warm, 1),
        "loss": round(loss, 4),
    }


def bound_seconds(weights: int, rows: int, share: float, link: float) -> dict[str, float]:
    """What a step takes at least, by what it computes and by what goes over the link, each way."""
    heads = SETTINGS.attention
    assert isinstance(heads, Heads)
    # The embedding is a table: nothing is multiplied with it.
    multiplied = weights - SETTINGS.vocabulary * SETTINGS.width
    inner = heads.num_heads * heads.head_dim
    products = 6 * multiplied * rows * LENGTH / PRODUCTS
    # Two products forward and five backward, of which the causal half is computed.
    attention = SETTINGS.num_layers * 7 * rows * LENGTH * LENGTH * inner / ATTENTION
    return {"compute": products + attention, "link": share * weights * STATE_BYTES / link}


def link_speed(num_bytes: int = 2**30) -> float:
    """Bytes/s to the GPU and back at once, of each way."""
    there, back = (torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    here, gone = (torch.empty(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    streams = [torch.cuda.Stream() for _ in range(2)]
    for timed in (False, True):
        torch.cuda.synchronize()
        begun = perf_counter()
        for _ in range(4):
            with torch.cuda.stream(streams[0]):
                here.copy_(there, non_blocking=True)
            with torch.cuda.stream(streams[1]):
                back.copy_(gone, non_blocking=True)
        torch.cuda.synchronize()
        if timed:
            return 4 * num_bytes / (perf_counter() - begun)
    raise AssertionError("the second time is timed")


def tokens(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    ids = torch.randint(SETTINGS.vocabulary, (rows, LENGTH + 1), device="cuda", generator=generator)
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


if __name__ == "__main__":
    main()
