"""The kernel of `adamw.py`. A large weight has a launch of its own; small ones share one, which finds them in a table.

Both compute the same bits, as every product and sum is written out: which weights share a launch changes nothing.
"""

# mypy: ignore-errors
# ruff: noqa: N803

from collections.abc import Sequence
from functools import lru_cache
from math import log
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Elements at a time, and warps.
BLOCK, WARPS = 2048, 4
#: How many a program of a large weight updates: the corrections are computed once for them.
RUN = 8 * BLOCK
#: Weights with fewer elements share a launch: to launch takes the host longer than the GPU to update them.
SMALL = 2**19


@triton.jit
def _corrections(step, logs):
    """1 - b1^t and 1 - b2^t, from the logarithms: in float64, as the difference is small at first."""
    count = tl.load(step).to(tl.float64)
    return 1.0 - tl.exp(count * tl.load(logs)), 1.0 - tl.exp(count * tl.load(logs + 1))


@triton.jit
def _update(
    weight, gradient, first, second, begin, end, correction1, correction2, divisor,
    lr, beta1, rest1, beta2, rest2, decay, eps,
    DECAYS_GRADIENT: tl.constexpr, DIVIDES: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    size = (lr / correction1).to(tl.float32)
    root = tl.sqrt(correction2).to(tl.float32)
    for start in range(0, RUN, BLOCK):
        at = begin + start + tl.arange(0, BLOCK)
        mask = at < end
        g = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
        m = tl.load(first + at, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(second + at, mask=mask, other=0.0).to(tl.float32)
        if DIVIDES:
            g = tl.div_rn(g, divisor)
            tl.store(gradient + at, g.to(gradient.dtype.element_ty), mask=mask)
        if DECAYS_GRADIENT:
            g = tl.fma(w, decay, g)
        else:
            w = tl.fma(w, -lr * decay, w)
        m = tl.fma(m, beta1, g * rest1)
        v = tl.fma(v, beta2, g * rest2 * g)
        below = tl.div_rn(tl.sqrt_rn(v), root) + eps
        w = w - tl.div_rn(m * size, below)
        tl.store(first + at, m.to(first.dtype.element_ty), mask=mask)
        tl.store(second + at, v.to(second.dtype.element_ty), mask=mask)
        tl.store(weight + at, w.to(weight.dtype.element_ty), mask=mask)


@triton.jit
def _one(
    weight, gradient, first, second, step, logs, divisor, skips, n, lr, beta1, rest1, beta2, rest2, decay, eps,
    DECAYS_GRADIENT: tl.constexpr, DIVIDES: tl.constexpr, MAY_SKIP: tl.constexpr,
    RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    is_on = True
    if MAY_SKIP:
        is_on = tl.load(skips) != 1.0
    if is_on:
        correction1, correction2 = _corrections(step, logs)
        divides = tl.load(divisor) if DIVIDES else 1.0
        _update(
            weight, gradient, first, second, tl.program_id(0).to(tl.int64) * RUN, n, correction1, correction2, divides,
            lr, beta1, rest1, beta2, rest2, decay, eps, DECAYS_GRADIENT, DIVIDES, RUN, BLOCK,
        )  # fmt: skip


@triton.jit
def _many(
    table, kind, logs, divisor, skips, lr, beta1, rest1, beta2, rest2, decay, eps,
    DECAYS_GRADIENT: tl.constexpr, DIVIDES: tl.constexpr, MAY_SKIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    is_on = True
    if MAY_SKIP:
        is_on = tl.load(skips) != 1.0
    if is_on:
        row = table + tl.program_id(0).to(tl.int64) * 7
        pointer = tl.pointer_type(kind.dtype.element_ty)
        correction1, correction2 = _corrections(tl.load(row + 4).to(tl.pointer_type(tl.float32)), logs)
        divides = tl.load(divisor) if DIVIDES else 1.0
        _update(
            tl.load(row).to(pointer), tl.load(row + 1).to(pointer), tl.load(row + 2).to(pointer),
            tl.load(row + 3).to(pointer), tl.load(row + 5), tl.load(row + 6), correction1, correction2, divides,
            lr, beta1, rest1, beta2, rest2, decay, eps, DECAYS_GRADIENT, DIVIDES, BLOCK, BLOCK,
        )  # fmt: skip


Entry = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def launch_adamw(entries: Sequence[Entry], settings: dict[str, Any], *, decays_gradient: bool) -> None:
    """Update weights: each with its gradient, its two moments, and its count of steps."""
    lr, beta1, beta2 = settings["lr"], settings["beta1"], settings["beta2"]
    device = entries[0][0].device
    logs = _logarithms(beta1, beta2, device)
    divisor, skips = settings.get("grad_scale"), settings.get("found_inf")
    numbers = tuple(map(float, (lr, beta1, 1 - beta1, beta2, 1 - beta2, settings["weight_decay"], settings["eps"])))
    options = {
        "DECAYS_GRADIENT": decays_gradient, "DIVIDES": divisor is not None, "MAY_SKIP": skips is not None,
        "BLOCK": BLOCK, "num_warps": WARPS,
    }  # fmt: skip
    optional = (logs if divisor is None else divisor, logs if skips is None else skips)
    # A graph that is being captured would keep the table's place in the host's memory.
    has_table = not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    rows = _rows([each for each in entries if has_table and each[0].numel() < SMALL])
    if rows:
        table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 7)
        if device.type == "cuda":
            table = table.pin_memory().to(device, non_blocking=True)
        _many[(len(table),)](table, entries[0][0].detach(), logs, *optional, *numbers, **options)
    for weight, gradient, first, second, step in entries:
        n = weight.numel()
        if n and not (has_table and n < SMALL):
            _one[(triton.cdiv(n, RUN),)](
                weight.detach(), gradient, first, second, step, logs, *optional, n, *numbers, RUN=RUN, **options
            )


def _rows(entries: Sequence[Entry]) -> list[int]:
    """Where the parts of small weights are: one row for each program."""
    found: list[int] = []
    for entry in entries:
        n, places = entry[0].numel(), [each.data_ptr() for each in entry]
        for start in range(0, n, BLOCK):
            found += [*places, start, n]
    return found


@lru_cache(maxsize=64)
def _logarithms(beta1: float, beta2: float, device: torch.device) -> Tensor:
    """Return the logarithms of both betas; of 0, a number whose exponential is 0."""
    return torch.tensor([log(each) if each else -1e9 for each in (beta1, beta2)], dtype=torch.float64, device=device)
