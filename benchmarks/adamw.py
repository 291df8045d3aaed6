"""AdamW's step on one GPU: ours and torch's fused one, on the same weights.

    python -m benchmarks.adamw [--save]

Weights are those of Llama-1B, and one of a quarter of a billion; in bf16 and fp32, with gradients divided by a number
of the device, as after a step of several microbatches, and as they are. Told are milliseconds (the median of 20, by the
device's events), and the bytes read and written over what a copy moves.
"""

import argparse
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from benchmarks.record import record
from shardwise.kernels import fused_adam
from shardwise.torch_private import step_divided

#: What a copy moves on an H200, bytes a second, read and written.
LIMIT = 4.24e12
REPEATS = 20
WHO = {"ours": fused_adam, "torch": nullcontext}


def shapes_of(name: str) -> list[tuple[int, ...]]:
    if name == "one weight":
        return [(2**28,)]
    layer = [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192)]
    return [(128_256, 2048), *[*layer, (2048,), (2048,)] * 16, (2048,)]


def milliseconds(optimizer: AdamW, divisor: Tensor | None) -> float:
    times: list[float] = []
    for _ in range(REPEATS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        if divisor is None:
            optimizer.step()
        else:
            step_divided(optimizer, divisor, torch.zeros((), device="cuda"))
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times[3:])


def measured(name: str, dtype: torch.dtype) -> dict[str, Any]:
    weights = [torch.nn.Parameter(torch.randn(shape, device="cuda", dtype=dtype)) for shape in shapes_of(name)]
    for each in weights:
        each.grad = torch.randn_like(each)
    optimizer = AdamW(weights, lr=1e-5, fused=True)
    numbers, found = sum(each.numel() for each in weights), dict[str, Any]()
    for word, divisor in (("plain", None), ("divided", torch.full((), 1.5, device="cuda"))):
        # Read: weight, gradient, two moments; written: all but the gradient, which a divisor changes too.
        limit = numbers * dtype.itemsize * (7 if divisor is None else 8) / LIMIT * 1e3
        for who, context in WHO.items():
            with context():
                took = milliseconds(optimizer, divisor)
            found[f"{who}, {word}"] = {"milliseconds": round(took, 3), "of_limit": round(limit / took, 3)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("one GPU is measured, and torch sees none")
        return
    results: dict[str, Any] = {}
    for name in ("one weight", "Llama-1B"):
        for dtype in (torch.bfloat16, torch.float32):
            key = f"{name}, {str(dtype).removeprefix('torch.')}"
            results[key] = measured(name, dtype)
            for who, each in results[key].items():
                print(
                    f"{key:24} {who:16} {each['milliseconds']:8.3f} ms, {each['of_limit']:.0%} of the limit", flush=True
                )
    if given.save:
        record("adamw", results)


if __name__ == "__main__":
    main()
