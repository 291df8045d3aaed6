"""The plain model that `single_gpu.py` compiles: what torch gives to somebody who writes only what is needed."""

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
