"""A linear layer of a few rows, with the gate that may stand behind it: a decode step of some sequences is made of it.

    x, a few rows ──┬─ y = W x + b
                    └─ activation(G x) * (U x), where W is G above U

As with one row (`row_linear.py`) the time is that of reading W. A library's kernels come close to that where W is
large; where it is not, their beginning and end are a quarter of it. This one asks for its weights while the kernel
before it ends. Products are those of tensor cores, with W on the side that has many rows.
"""

from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import linear

from shardwise.kernels.choose import takes_kernel
from shardwise.kernels.gated import Activation, gated
from shardwise.kernels.launch import overlapping

#: Tried up to so many rows; more are a library's.
MOST_ROWS = 32
#: What a program reads of W at a time has so many columns: W is a multiple of that wide.
COLUMNS = 64


def few_rows_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    kernels: bool = True,
) -> Tensor:
    """`x` is [rows, in]. The output, [rows, out] or half of that behind a gate; of many rows by torch's product."""
    if kernels and _are_few(x, weight) and takes_kernel("few_rows_linear", x, weight, bias):
        from shardwise.kernels.few_rows_linear_triton import forward

        return forward(x, weight, bias, activation)
    made = linear(x, weight, bias)
    if activation is None:
        return made
    return gated(*cast("tuple[Tensor, Tensor]", made.chunk(2, -1)), activation, kernels=kernels)


def _are_few(x: Tensor, weight: Tensor) -> bool:
    """That there are more of them, fp32, or an older GPU, is no lack: a library has those."""
    if x.is_cuda and not overlapping(x.device)["OVERLAPS"]:
        return False
    is_half = x.dtype in (torch.bfloat16, torch.float16) and weight.dtype == x.dtype
    lies = x.is_contiguous() and weight.is_contiguous() and x.shape[1] % COLUMNS == 0
    return is_half and lies and 1 < len(x) <= MOST_ROWS
