"""A linear layer of a few rows, with the gate that may stand behind it: a decode step of some sequences is made of it.

    x, a few rows ──┬─ y = W x + b
                    └─ activation(G x) * (U x), where W is G above U

As with one row (`row_linear.py`) the time is that of reading W. A library's kernels come close to that where W is
large; where it is not, their beginning and end are a quarter of it. This one asks for its weights while the kernel
before it ends. Products are those of tensor cores, with W on the side that has many rows.

A W of fewer bits (`narrow.py`) is made wide in registers, tile by tile, again for each 64 rows of x. So with more
than `MOST_ROWS_NARROW` rows it is made wide once, in memory, and multiplied by torch. By its bytes, not measured: of an
8B that writes and reads 24 GB more, 6 ms, where the products of 2,048 tokens are 55 ms of a library's kernels, whose
speed no short program with conversions between its products would have.
"""

from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import linear

from shardwise.kernels.choose import takes_kernel
from shardwise.kernels.gated import Activation, gated
from shardwise.kernels.launch import is_on_gpu, overlapping
from shardwise.kernels.narrow import RUN, NarrowWeight
from shardwise.kernels.widen import widen

#: Tried up to so many rows; more are a library's.
MOST_ROWS = 32
#: With weights of fewer bits.
MOST_ROWS_NARROW = 128
#: What a program reads of W at a time has so many columns: W is a multiple of that wide.
COLUMNS = 64


def few_rows_linear(
    x: Tensor,
    weight: Tensor | NarrowWeight,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    kernels: bool = True,
) -> Tensor:
    """`x` is [rows, in]. The output, [rows, out] or half of that behind a gate; of many rows by torch's product."""
    if isinstance(weight, Tensor):
        is_taken = kernels and _are_few(x, weight) and takes_kernel("few_rows_linear", x, weight, bias)
    else:
        is_taken = kernels and _are_few_narrow(x, weight) and takes_kernel("few_rows_linear", x, weight.scales, bias)
    if is_taken:
        from shardwise.kernels.few_rows_linear_triton import forward

        return forward(x, weight, bias, activation)
    made = linear(x, widen(weight, kernels=kernels), bias)
    if activation is None:
        return made
    return gated(*cast("tuple[Tensor, Tensor]", made.chunk(2, -1)), activation, kernels=kernels)


def _are_few(x: Tensor, weight: Tensor) -> bool:
    """That there are more of them, fp32, or an older GPU, is no lack: a library has those."""
    if is_on_gpu(x) and not overlapping(x.device)["OVERLAPS"]:
        return False
    is_half = x.dtype in (torch.bfloat16, torch.float16) and weight.dtype == x.dtype
    lies = x.is_contiguous() and weight.is_contiguous() and x.shape[1] % COLUMNS == 0
    return is_half and lies and 1 < len(x) <= MOST_ROWS


def _are_few_narrow(x: Tensor, weight: NarrowWeight) -> bool:
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    return (
        is_half
        and x.shape[1] % RUN == 0
        and x.is_contiguous()
        and weight.has_kernels()
        and 0 < len(x) <= MOST_ROWS_NARROW
    )
