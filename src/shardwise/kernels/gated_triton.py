"""The kernels of `gated.py`."""

# mypy: ignore-errors
# ruff: noqa: N803, ARG001

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from shardwise.kernels.device_functions import activate, slope_of
from shardwise.kernels.launch import launch, rows_of

#: Elements per program. `benchmarks/kernels.py --sweep` tries others.
BLOCK, WARPS = 2048, 8


@triton.jit
def _forward(gate, up, out, gate_stride, up_stride, n, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    blocks = tl.cdiv(n, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n
    g = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=mask, other=0.0)
    # Round before the product, as the definition does.
    a = activate(g, ACTIVATION).to(u.dtype)
    tl.store(out + row * n + column, (a.to(tl.float32) * u.to(tl.float32)).to(u.dtype), mask=mask)


@triton.jit
def _backward(
    gradient, gate, up, d_gate, d_up, gradient_stride, gate_stride, up_stride, n,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(n, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n
    d = tl.load(gradient + row * gradient_stride + column, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    out = row * n + column
    tl.store(d_up + out, (d * activate(g, ACTIVATION)).to(d_up.dtype.element_ty), mask=mask)
    tl.store(d_gate + out, (d * u * slope_of(g, ACTIVATION)).to(d_gate.dtype.element_ty), mask=mask)


def _shape(*tensors: Tensor) -> tuple[int, int]:
    """Return rows and columns; one row if everything is contiguous."""
    rows, columns = tensors[0].shape
    return (1, rows * columns) if all(each.is_contiguous() for each in tensors) else (rows, columns)


@custom_op("shardwise::gated_forward", mutates_args=())
def gated_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return launch_gated(gate, up, activation)


def launch_gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if gate.numel():
        gate, up = rows_of(gate), rows_of(up)
        rows, n = _shape(gate, up)
        launch(
            _forward, (rows * triton.cdiv(n, BLOCK),),
            gate, up, out, gate.stride(0), up.stride(0), n, ACTIVATION=activation, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return out


@gated_forward.register_fake
def _(gate, up, activation):
    return gate.new_empty(gate.shape)


@custom_op("shardwise::gated_backward", mutates_args=())
def gated_backward(gradient: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    made = tuple(torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    if gate.numel():
        gradient, gate, up = rows_of(gradient), rows_of(gate), rows_of(up)
        rows, n = _shape(gradient, gate, up)
        _backward[(rows * triton.cdiv(n, BLOCK),)](
            gradient, gate, up, *made, gradient.stride(0), gate.stride(0), up.stride(0), n,
            ACTIVATION=activation, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return made


@gated_backward.register_fake
def _(gradient, gate, up, activation):
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)
