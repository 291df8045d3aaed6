"""Calls of torch that multiply matrices, as operations of a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwise.model.operations import Attention, Convolution, Embedding, Matmul, Operation, Product, Width
from shardwise.torch_private import CUDNN_ATTENTION, EFFICIENT_ATTENTION, FLASH, FLASH_ON_CPU, GROUPED_MM

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a call is seen against: the samples of the batch, its positions, and which tensors are parameters.

    `parameter` gives a parameter's key for a tensor that is one, or a view or a cast of one; else None.
    """

    num_samples: int
    num_positions: int
    parameter: Callable[[Tensor], int | None]

    def each(self, count: int) -> int:
        """Return a count per sample. A count that does not depend on the batch is spread over it, rounded up."""
        return -(-count // self.num_samples)


def find_operation(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], setting: Setting
) -> Operation | None:
    """Return the matrix product that a call is; None for other calls."""
    if function in _CAUSAL_AT:
        place = _CAUSAL_AT[function]
        causal = args[place] if len(args) > place else kwargs.get("is_causal", False)
        return _attention(args, setting, causal=bool(causal))
    maker = _MAKERS.get(function)
    return None if maker is None else maker(args, setting)


def expert_weights(function: Any, args: tuple[Any, ...]) -> Tensor | None:
    """Return the tensor with the weights of all experts that a grouped product uses."""
    return args[1] if function is GROUPED_MM.default and args[1].dim() == 3 else None


def _mm(args: tuple[Any, ...], setting: Setting) -> Operation:
    """Return rows times a weight, on either side, perhaps added to a bias; or a product of activations."""
    left, right = args[-2:]
    bias = len(args) > 2 and setting.parameter(args[0]) is not None
    (rows, k), columns = left.shape, right.shape[1]
    if setting.parameter(right) is not None:
        return _matmul(left, right, k, columns, rows=setting.each(rows), bias=bias)
    if setting.parameter(left) is not None:
        return _matmul(right, left, k, rows, rows=setting.each(columns), bias=bias)
    return Product(name="mm", batch=1, m=setting.each(rows), k=k, n=columns)


def _matmul(inputs: Tensor, weight: Tensor, k: int, n: int, *, name: str = "matmul", **more: Any) -> Matmul:
    return Matmul(
        name=name,
        inputs=Width(k),
        outputs=(Width(n),),
        trains=weight.requires_grad,
        input_gradient=inputs.requires_grad,
        **more,
    )


def _bmm(args: tuple[Any, ...], setting: Setting) -> Operation:
    left, right = args[-2:]
    (batch, m, k), n = left.shape, right.shape[2]
    if setting.parameter(right) is not None:
        return _matmul(left, right, k, n, num_experts=batch, rows=setting.each(batch * m))
    return Product(name="bmm", batch=setting.each(batch), m=m, k=k, n=n)


def _grouped_mm(args: tuple[Any, ...], setting: Setting) -> Operation:
    """Return a product of rows sorted by expert. If they are a multiple of the positions, that is the experts per
    token."""
    left, right = args[0], args[1]
    rows, k, n = prod(left.shape[:-1]), left.shape[-1], right.shape[-1]
    sent = rows // setting.num_positions if rows % setting.num_positions == 0 else 1
    routed = {"num_experts": right.shape[0], "top_k": sent, "rows": setting.each(rows // sent)}
    return _matmul(left, right, k, n, name="expert matmul", **routed)


def _attention(args: tuple[Any, ...], setting: Setting, *, causal: bool) -> Operation:
    queries, keys, values = args[:3]
    batch, heads, rows, qk_dim = queries.shape
    # Attention over windows of an image has more sequences than samples: they count as further heads.
    return Attention(
        name="attention",
        heads=setting.each(batch * heads),
        kv_heads=setting.each(batch * keys.shape[1]),
        qk_dim=qk_dim,
        v_dim=values.shape[-1],
        causal=causal,
        rows=rows,
        key_rows=keys.shape[2],
    )


def _convolution(args: tuple[Any, ...], setting: Setting) -> Operation:
    """Return a filter, or the transpose of one, which is applied at each position of the input."""
    inputs, weight, bias = args[:3]
    padding, dilation, transposed, output_padding, groups = args[4], args[5], args[6], args[7], args[8]
    in_positions = setting.each(inputs.shape[0]) * prod(inputs.shape[2:])
    kernel = weight.shape[2:]
    if transposed:
        sides = [
            (side - 1) * stride - 2 * pad + spread * (taps - 1) + more + 1
            for side, stride, pad, spread, taps, more in zip(
                inputs.shape[2:], args[3], padding, dilation, kernel, output_padding, strict=True
            )
        ]
    else:
        sides = [
            (side + 2 * pad - spread * (taps - 1) - 1) // stride + 1
            for side, stride, pad, spread, taps in zip(
                inputs.shape[2:], args[3], padding, dilation, kernel, strict=True
            )
        ]
    out_positions = setting.each(inputs.shape[0]) * prod(sides)
    return Convolution(
        name="convolution",
        in_channels=inputs.shape[1],
        out_channels=weight.shape[1] * groups if transposed else weight.shape[0],
        kernel=prod(kernel),
        positions=in_positions if transposed else out_positions,
        in_positions=in_positions,
        out_positions=out_positions if transposed else None,
        groups=groups,
        bias=bias is not None,
        trains=weight.requires_grad,
        input_gradient=inputs.requires_grad,
    )


def _embedding(args: tuple[Any, ...], setting: Setting) -> Operation | None:
    table, indices = args[:2]
    if setting.parameter(table) is None:
        return None
    return Embedding(
        name="embedding",
        vocabulary=table.shape[0],
        elements=table.shape[1],
        sharding="none",
        rows=setting.each(indices.numel()),
        trains=table.requires_grad,
    )


# Which argument of each kernel of attention says that it is causal, where it is not a keyword.
_CAUSAL_AT = {FLASH_ON_CPU.default: 4, FLASH.default: 4, EFFICIENT_ATTENTION.default: 6, CUDNN_ATTENTION.default: 6}
_MAKERS: dict[Any, Callable[[tuple[Any, ...], Setting], Operation | None]] = {
    aten.mm.default: _mm,
    aten.addmm.default: _mm,
    aten.bmm.default: _bmm,
    aten.baddbmm.default: _bmm,
    GROUPED_MM.default: _grouped_mm,
    aten.convolution.default: _convolution,
    aten.embedding.default: _embedding,
}
