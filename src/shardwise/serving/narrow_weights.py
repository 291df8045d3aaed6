"""Layers with quantised ("narrow") weights, fp8 or int4: stored so, and read so by matmuls (`kernels/narrow.py`).

Activations, embeddings, norms, biases and the head keep their precision. Experts are dequantised when they are used,
all of them in every step: on a GPU that saves memory and costs time.
"""

import torch
from torch import Tensor, nn

from shardwise.errors import unknown
from shardwise.kernels.few_rows_linear import few_rows_linear
from shardwise.kernels.narrow import KINDS, NarrowWeight, make_narrow
from shardwise.kernels.row_linear import row_linear
from shardwise.kernels.widen import widen
from shardwise.nets.experts import Experts
from shardwise.nets.transformer import Transformer


class Narrow(nn.Module):
    """One quantised weight, [..., inputs]."""

    codes: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, kind: str) -> None:
        super().__init__()
        made = make_narrow(weight, kind)
        self.kind, self.shape, self.dtype = kind, weight.shape, weight.dtype
        self.register_buffer("codes", made.codes)
        self.register_buffer("scales", made.scales)

    @property
    def weight(self) -> NarrowWeight:
        return NarrowWeight(
            kind=self.kind, codes=self.codes, scales=self.scales, inputs=self.shape[-1], dtype=self.dtype
        )


class NarrowLinear(nn.Module):
    """A linear layer with a quantised weight."""

    def __init__(self, linear: nn.Linear, kind: str) -> None:
        super().__init__()
        self.narrow, self.bias = Narrow(linear.weight.data, kind), linear.bias

    @property
    def weight(self) -> NarrowWeight:
        return self.narrow.weight

    def forward(self, given: Tensor) -> Tensor:
        rows = given.reshape(-1, given.shape[-1])
        if len(rows) == 1:
            made, _ = row_linear(rows, self.weight, self.bias)
        else:
            made = few_rows_linear(rows, self.weight, self.bias)
        return made.view(*given.shape[:-1], -1)


class NarrowExperts(nn.Module):
    """Experts whose three weights, [experts, in, out], are quantised along their inputs."""

    def __init__(self, experts: Experts, kind: str) -> None:
        super().__init__()
        self.activation, self.kernels = experts.activation, experts.kernels
        weights = (experts.gate_proj, experts.up_proj, experts.down_proj)
        self.gate, self.up, self.down = (Narrow(each.data.transpose(1, 2), kind) for each in weights)

    gate_proj = property(lambda self: widen(self.gate.weight).transpose(1, 2))
    up_proj = property(lambda self: widen(self.up.weight).transpose(1, 2))
    down_proj = property(lambda self: widen(self.down.weight).transpose(1, 2))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        return Experts.forward(self, rows, counts)  # type: ignore[arg-type]


def check_kind(kind: str | None) -> None:
    """Refuse an unknown kind."""
    if kind is not None and kind not in KINDS:
        raise unknown("weights", kind, KINDS)


@torch.no_grad()
def narrow(model: Transformer, kind: str | None, *, is_rehearsed: bool = False) -> None:
    """Quantise the weights of all layers in place. Weights that this rank does not have (on the meta device) are left
    alone, unless `is_rehearsed` says that the whole model is on the meta device."""
    if kind is None:
        return
    for module in [each for layer in model.layers for each in layer.modules()]:
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and (is_rehearsed or not child.weight.is_meta):
                setattr(module, name, NarrowLinear(child, kind))
            elif isinstance(child, Experts) and (is_rehearsed or not child.gate_proj.is_meta):
                setattr(module, name, NarrowExperts(child, kind))
    if model.embed.weight.is_cuda:
        torch.cuda.empty_cache()  # Return the freed memory: KV blocks are counted from what is free.


def num_parameters(model: nn.Module) -> int:
    """Count the parameters that are on this rank, quantised ones by their number of elements."""
    plain = sum(each.numel() for each in model.parameters() if not each.is_meta)
    return plain + sum(each.shape.numel() for each in model.modules() if isinstance(each, Narrow))


def weight_bytes(model: nn.Module) -> int:
    return sum(
        each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers()) if not each.is_meta
    )
