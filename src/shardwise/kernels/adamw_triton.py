"""The kernel of `adamw.py`: one launch for all weights, however many and whatever their sizes.

    programs   0  1  2 | 3 | 4  5 ...        each updates a run of one weight
    owners     0  0  0 | 1 | 2  2 ...        the weight of a program
    rows       where a weight, its gradient, its moments and its count are; its first program; how many numbers it has

Both tables stay on the device. Rows change when a gradient is somewhere else than in the step before.
"""

# mypy: ignore-errors
# ruff: noqa: N803

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from math import log
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Elements at a time, and warps: every thread has 16 bytes of each tensor in 16 bits.
BLOCK, WARPS = 1024, 4
#: How many a program updates: the corrections are computed once for them.
RUN = 32 * BLOCK
_KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
#: Vectors are read where every pointer is a multiple of this.
ALIGNED = 16
#: Tables of so many sets of weights are kept: those of every optimizer, and of gradients that move to and fro.
_KEPT = 32

Entry = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@triton.jit
def _block(
    weight, gradient, first, second, at, mask, size, root, divisor, lr, beta1, rest1, beta2, rest2, decay, eps,
    DECAYS_GRADIENT: tl.constexpr, DIVIDES: tl.constexpr,
):  # fmt: skip
    g = tl.load(gradient + at, mask=mask).to(tl.float32)
    w = tl.load(weight + at, mask=mask).to(tl.float32)
    m = tl.load(first + at, mask=mask).to(tl.float32)
    v = tl.load(second + at, mask=mask).to(tl.float32)
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
def _place(row, KIND: tl.constexpr, IS_ALIGNED: tl.constexpr):
    place = tl.load(row).to(tl.pointer_type(KIND))
    return tl.multiple_of(place, 16) if IS_ALIGNED else place


@triton.jit
def _adamw(
    owners, rows, logs, divisor, skips, lr, beta1, rest1, beta2, rest2, decay, eps,
    DECAYS_GRADIENT: tl.constexpr, DIVIDES: tl.constexpr, MAY_SKIP: tl.constexpr, IS_ALIGNED: tl.constexpr,
    KIND: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    is_on = True
    if MAY_SKIP:
        is_on = tl.load(skips) != 1.0
    if is_on:
        row = rows + tl.load(owners + tl.program_id(0)).to(tl.int64) * 7
        weight, gradient = _place(row, KIND, IS_ALIGNED), _place(row + 1, KIND, IS_ALIGNED)
        first, second = _place(row + 2, KIND, IS_ALIGNED), _place(row + 3, KIND, IS_ALIGNED)
        begin, n = (tl.program_id(0) - tl.load(row + 5)) * RUN, tl.load(row + 6)
        # 1 - b1^t and 1 - b2^t, from the logarithms: in float64, as the difference is small at first.
        count = tl.load(tl.load(row + 4).to(tl.pointer_type(tl.float32))).to(tl.float64)
        size = (lr / (1.0 - tl.exp(count * tl.load(logs)))).to(tl.float32)
        root = tl.sqrt(1.0 - tl.exp(count * tl.load(logs + 1))).to(tl.float32)
        divides = tl.load(divisor) if DIVIDES else 1.0
        if begin + RUN <= n:
            for block in range(0, RUN, BLOCK):
                _block(
                    weight, gradient, first, second, begin + block + tl.arange(0, BLOCK), None, size, root, divides,
                    lr, beta1, rest1, beta2, rest2, decay, eps, DECAYS_GRADIENT, DIVIDES,
                )  # fmt: skip
        else:
            for start in range(begin, n, BLOCK):
                _block(
                    weight, gradient, first, second, start + tl.arange(0, BLOCK), start + tl.arange(0, BLOCK) < n, size,
                    root, divides, lr, beta1, rest1, beta2, rest2, decay, eps, DECAYS_GRADIENT, DIVIDES,
                )  # fmt: skip


def launch_adamw(entries: Sequence[Entry], settings: dict[str, Any], *, decays_gradient: bool) -> None:
    """Update weights: each with its gradient, its two moments, and its count of steps. Those whose tensors begin
    anywhere have a second launch."""
    lr, beta1, beta2 = settings["lr"], settings["beta1"], settings["beta2"]
    device, kind = entries[0][0].device, _KINDS[entries[0][0].dtype]
    logs = _logarithms(beta1, beta2, device)
    divisor, skips = settings.get("grad_scale"), settings.get("found_inf")
    numbers = tuple(map(float, (lr, beta1, 1 - beta1, beta2, 1 - beta2, settings["weight_decay"], settings["eps"])))
    places = [(tuple(tensor.data_ptr() for tensor in each), each[0].numel()) for each in entries if each[0].numel()]
    for is_aligned in (True, False):
        found = tuple(each for each in places if is_aligned == all(place % ALIGNED == 0 for place in each[0][:4]))
        if found:
            owners = _owners(tuple(n for _, n in found), RUN, device)
            _adamw[(len(owners),)](
                owners, _ROWS.of(found, device), logs, logs if divisor is None else divisor,
                logs if skips is None else skips, *numbers, DECAYS_GRADIENT=decays_gradient,
                DIVIDES=divisor is not None, MAY_SKIP=skips is not None, IS_ALIGNED=is_aligned, KIND=kind, RUN=RUN,
                BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip


@lru_cache(maxsize=_KEPT)
def _owners(sizes: tuple[int, ...], run: int, device: torch.device) -> Tensor:
    counts = torch.tensor([triton.cdiv(n, run) for n in sizes], device="cpu")
    return torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32, device="cpu"), counts).to(device)


class _Rows:
    """Tables of places, on the device. A table is right for ever: it is found by all that it holds, and by the stream
    on which it was copied there."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Any, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, places: tuple[tuple[tuple[int, ...], int], ...], device: torch.device) -> Tensor:
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = (places, device, stream, RUN)
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                found = self._kept[key] = _table(places, device)
            self._kept.move_to_end(key)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return found


_ROWS = _Rows()


def _table(places: tuple[tuple[tuple[int, ...], int], ...], device: torch.device) -> Tensor:
    rows, program = [], 0
    for pointers, n in places:
        rows.append([*pointers, program, n])
        program += triton.cdiv(n, RUN)
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


@lru_cache(maxsize=_KEPT)
def _logarithms(beta1: float, beta2: float, device: torch.device) -> Tensor:
    """Return the logarithms of both betas; of 0, a number whose exponential is 0."""
    return torch.tensor([log(each) if each else -1e9 for each in (beta1, beta2)], dtype=torch.float64, device=device)
