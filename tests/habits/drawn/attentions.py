"""Attention as people write it by hand: in one class, with a choice for every line of it."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS = 16, 4

CHOICES: dict[str, tuple[Any, ...]] = {
    "projections": ("three", "fused", "kv", "without bias"),
    "parted": ("view", "reshape", "unflatten", "einops"),
    "heads": ("num_heads", "nhead", "H", "literal", "from the width"),
    "scores": ("matmul", "einsum", "sdpa", "baddbmm"),
    "scale": ("head_dim", "attribute", "size", "of q", "none"),
    "mask": ("none", "causal", "buffer", "additive"),
    "softmax": ("method", "functional", "float"),
    "merged": ("reshape", "flatten", "view", "einsum"),
    "extra": (
        "none", "qk norm", "temperature", "slopes", "gate", "rotary", "talking heads", "out heads", "fewer keys",
        "returns weights",
    ),
}  # fmt: skip


class Attention(nn.Module):
    """Self-attention over [batch, tokens, 16], with 4 heads."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how = how
        self.head_dim = WIDTH // HEADS
        if how["heads"] in ("num_heads", "nhead", "H"):
            setattr(self, how["heads"], HEADS)
        keys = WIDTH // 2 if how["extra"] == "fewer keys" else WIDTH
        bias = how["projections"] != "without bias"
        if how["projections"] == "fused":
            self.qkv = nn.Linear(WIDTH, WIDTH + 2 * keys)
        elif how["projections"] == "kv":
            self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * keys)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, size, bias=bias) for size in (WIDTH, keys, keys))
        self.out = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.keys = keys
        self.scale = self.head_dim**-0.5
        self._more(how["extra"])
        if how["mask"] == "buffer":
            self.register_buffer("tril", torch.ones(32, 32).tril().view(1, 1, 32, 32))

    def _more(self, extra: str) -> None:
        if extra == "qk norm":
            self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)
        elif extra == "temperature":
            self.temperature = nn.Parameter(torch.linspace(0.5, 1.5, HEADS).view(1, HEADS, 1, 1))
        elif extra == "slopes":
            self.register_buffer("slopes", torch.linspace(0.1, 0.8, HEADS).view(1, HEADS, 1, 1))
        elif extra == "gate":
            self.gate = nn.Linear(WIDTH, WIDTH)
        elif extra == "talking heads":
            self.talk = nn.Linear(HEADS, HEADS, bias=False)
        elif extra == "out heads":
            self.by_head = nn.Parameter(torch.ones(HEADS))

    def _num_heads(self, x: Tensor) -> int:
        kind = self.how["heads"]
        if kind == "literal":
            return 4
        if kind == "from the width":
            return x.shape[-1] // self.head_dim
        found: int = getattr(self, kind)
        return found

    def _heads(self, x: Tensor, count: int) -> Tensor:
        """[batch, heads, tokens, head_dim]."""
        batch, tokens, _ = x.shape
        parted = self.how["parted"]
        if parted == "view":
            return x.view(batch, tokens, count, x.shape[-1] // count).transpose(1, 2)
        if parted == "reshape":
            return x.reshape(batch, tokens, count, -1).permute(0, 2, 1, 3)
        if parted == "unflatten":
            return x.unflatten(-1, (count, self.head_dim)).transpose(1, 2)
        return x.reshape(batch, tokens, count, self.head_dim).transpose(1, 2).contiguous()

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.how["projections"] == "fused":
            made = self.qkv(x)
            if self.keys != WIDTH:
                q, k, v = made.split([WIDTH, self.keys, self.keys], dim=-1)
            elif self.how["merged"] == "flatten":
                q, k, v = made[..., :WIDTH], made[..., WIDTH : 2 * WIDTH], made[..., 2 * WIDTH :]
            else:
                q, k, v = made.chunk(3, dim=-1)
            return q, k, v
        if self.how["projections"] == "kv":
            k, v = self.kv(x).chunk(2, dim=-1)
            return self.q(x), k, v
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def _masked(self, scores: Tensor, tokens: int) -> Tensor:
        mask = self.how["mask"]
        if mask == "causal":
            later = torch.triu(torch.ones(tokens, tokens, dtype=torch.bool), diagonal=1)
            return scores.masked_fill(later, float("-inf"))
        if mask == "buffer":
            return scores.masked_fill(self.tril[:, :, :tokens, :tokens] == 0, float("-inf"))
        if mask == "additive":
            return scores + torch.full((tokens, tokens), -1e4).triu(1).to(scores)
        return scores

    def _turned(self, q: Tensor) -> Tensor:
        half = q.shape[-1] // 2
        angle = torch.arange(q.shape[-2])[:, None] * torch.tensor([1.0, 0.1])[None, :half]
        cos, sin = angle.cos().to(q), angle.sin().to(q)
        one, other = q[..., :half], q[..., half:]
        return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)

    def _scale(self, x: Tensor, q: Tensor) -> float:
        kind = self.how["scale"]
        if kind == "attribute":
            return self.scale
        if kind == "size":
            return 1 / math.sqrt(x.size(-1) // HEADS)
        if kind == "of q":
            return float(q.size(-1) ** -0.5)
        return 1.0 if kind == "none" else 1 / math.sqrt(self.head_dim)

    def _attended(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        how, tokens, scale = self.how, x.shape[1], self._scale(x, q)
        if how["scores"] == "sdpa" and how["extra"] not in ("temperature", "slopes", "talking heads"):
            if how["mask"] in ("none", "causal"):
                return functional.scaled_dot_product_attention(q, k, v, is_causal=how["mask"] == "causal", scale=scale)
            mask = self._masked(q.new_zeros(1, 1, tokens, tokens), tokens)
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        if how["scores"] == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * scale
        elif how["scores"] == "baddbmm":
            flat = torch.baddbmm(
                q.new_zeros(1, 1, 1), q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), beta=0, alpha=scale
            )
            scores = flat.view(*q.shape[:2], tokens, tokens)
        else:
            scores = (q * scale) @ k.transpose(-2, -1)
        if how["extra"] == "temperature":
            scores = scores * self.temperature
        if how["extra"] == "slopes":
            scores = scores - self.slopes * torch.arange(tokens).flip(0).to(scores)
        scores = self._masked(scores, tokens)
        if how["softmax"] == "functional":
            weights = functional.softmax(scores, dim=-1)
        elif how["softmax"] == "float":
            weights = torch.softmax(scores, -1, dtype=scores.dtype)
        else:
            weights = scores.softmax(dim=-1)
        if how["extra"] == "talking heads":
            weights = self.talk(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        if how["extra"] == "returns weights":
            self.last = weights.detach().mean()
        return torch.einsum("bhqk,bhkd->bhqd", weights, v) if how["scores"] == "einsum" else weights @ v

    def forward(self, x: Tensor) -> Tensor:
        count, extra = self._num_heads(x), self.how["extra"]
        q, k, v = self._projected(x)
        fewer = count // 2 if extra == "fewer keys" else count
        q, k, v = self._heads(q, count), self._heads(k, fewer), self._heads(v, fewer)
        if extra == "fewer keys":
            k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        if extra == "qk norm":
            q, k = self.q_norm(q), self.k_norm(k)
        if extra == "rotary":
            q, k = self._turned(q), self._turned(k)
        made = self._attended(x, q, k, v)
        if extra == "out heads":
            made = made * self.by_head.view(1, -1, 1, 1)
        merged = self._merged(made, x)
        if extra == "gate":
            merged = merged * torch.sigmoid(self.gate(x))
        projected: Tensor = self.out(merged)
        return projected

    def _merged(self, made: Tensor, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        how = self.how["merged"]
        if how == "flatten":
            return made.transpose(1, 2).flatten(2)
        if how == "view":
            return made.permute(0, 2, 1, 3).contiguous().view(batch, tokens, -1)
        if how == "einsum":
            return torch.einsum("bhqd->bqhd", made).reshape(batch, tokens, WIDTH)
        return made.transpose(1, 2).reshape(batch, tokens, -1)
