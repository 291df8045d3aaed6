"""A linear layer for a few rows, with an optional gate: the matmul of a decode step with a few sequences.

    x, a few rows ──┬─ y = W x + b
                    └─ activation(G x) * (U x), where W is G above U

As with one row (`row_linear.py`), the time is that of reading W. A library's kernels come close to that if W is large;
otherwise their prologue and epilogue take a quarter of the time. This kernel requests its weights while the previous
kernel ends. It uses tensor cores, with W as the operand that has many rows.

A quantised W (`narrow.py`) is dequantised in registers, tile by tile, once for each 64 rows of x. So with more than
`MOST_ROWS_NARROW` rows it is dequantised once, in memory, and multiplied by torch. Estimated from bytes, not measured:
for an 8B model that writes and reads 24 GB more, 6 ms, while the products of 2,048 tokens take a library's kernels 55
ms, a speed that no short kernel with conversions between its products would reach.
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

#: The most rows that were tried; for more, a library is used.
MOST_ROWS = 32
#: The same for quantised weights.
MOST_ROWS_NARROW = 128
#: Columns of W that a program reads at a time: the width of W is a multiple of this.
COLUMNS = 64


def few_rows_linear(
    x: Tensor,
    weight: Tensor | NarrowWeight,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    kernels: bool = True,
) -> Tensor:
    """Return [rows, out], or half of that with a gate, for `x`, [rows, in]. Many rows use torch's matmul."""
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
    """Whether the kernel applies. More rows, fp32 and older GPUs need no warning: a library handles them."""
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
