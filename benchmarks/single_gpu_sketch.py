"""The plain model that `single_gpu.py` compiles: what torch gives to somebody who writes only what is needed."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, key_heads: int, dim: int, inner: int) -> None:
        super().__init__()
        self.dim, self.sizes = dim, [heads * dim, key_heads * dim, key_heads * dim]
        self.first, self.second = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.qkv, self.out = nn.Linear(width, sum(self.sizes), bias=False), nn.Linear(heads * dim, width, bias=False)
        self.gate_up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        normed = rms_norm(hidden, hidden.shape[-1:], self.first, 1e-6)
        q, k, v = (
            each.unflatten(-1, (-1, self.dim)).transpose(1, 2) for each in self.qkv(normed).split(self.sizes, -1)
        )
        q, k = turned(q, cosine, sine), turned(k, cosine, sine)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        hidden = hidden + self.out(seen.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(rms_norm(hidden, hidden.shape[-1:], self.second, 1e-6)).chunk(2, -1)
        made: Tensor = hidden + self.down(silu(gate) * up)
        return made


def turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1).type_as(x)


class Sketch(nn.Module):
    def __init__(
        self, vocabulary: int, width: int, layers: int, heads: int, key_heads: int, dim: int, inner: int
    ) -> None:
        super().__init__()
        self.dim = dim
        self.embed = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(width, heads, key_heads, dim, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(width, 1e-6)

    def forward(self, ids: Tensor) -> Tensor:
        even = torch.arange(0, self.dim, 2, device=ids.device) / self.dim
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * 10_000.0**-even
        cosine, sine = angles.cos(), angles.sin()
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden, cosine, sine)
        made: Tensor = self.norm(hidden)
        return made


def cast(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax().float().clamp(min=1e-12) / torch.finfo(kind).max
    return (x.float() / scale).to(kind), scale


class InFp8(torch.autograd.Function):
    """A linear layer in 8 bits, with a scale for each tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        narrow, scale = cast(x, torch.float8_e4m3fn)
        matrix, weight_scale = cast(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(narrow, scale, weight)
        made: Tensor = torch._scaled_mm(
            narrow, matrix.t(), scale, weight_scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        narrow, scale, weight = ctx.saved_tensors
        made, made_scale = cast(gradient, torch.float8_e5m2)
        matrix, weight_scale = cast(weight, torch.float8_e4m3fn)
        how = {"out_dtype": torch.bfloat16, "use_fast_accum": False}
        back = torch._scaled_mm(made, matrix.t().contiguous().t(), made_scale, weight_scale, **how)
        turned = torch._scaled_mm(made.t().contiguous(), narrow.t().contiguous().t(), made_scale, scale, **how)
        return back, turned


class Fp8Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        made: Tensor = InFp8.apply(input.flatten(0, -2), self.weight)  # type: ignore[no-untyped-call]
        return made.unflatten(0, input.shape[:-1])


def in_fp8(model: nn.Module) -> None:
    for each in model.modules():
        if type(each) is nn.Linear:
            each.__class__ = Fp8Linear
