"""The model of the benchmarks of real training: LLaMA-like, plain, whole or in parts for a peer that needs them."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

HIDDEN, LAYERS, HEADS, FFN, VOCABULARY = 512, 8, 8, 1376, 8192
BATCH, LENGTH = 16, 256


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        frequencies = 10_000 ** -(torch.arange(0, HIDDEN // HEADS, 2) / (HIDDEN // HEADS))
        angles = torch.outer(torch.arange(LENGTH), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (
            each(hidden).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def turned(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-second, first], dim=-1) * self.sin


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention = Attention()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, FFN, bias=False), nn.Linear(HIDDEN, FFN, bias=False)
        self.down_proj = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        x = self.mlp_norm(hidden)
        out: Tensor = hidden + self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Llama(nn.Module):
    """The whole model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        out: Tensor = self.head(self.norm(hidden))
        return out


class LlamaPart(nn.Module):
    """One stage of it, given how many layers each stage has."""

    def __init__(self, layers: tuple[int, ...], stage: int) -> None:
        super().__init__()
        whole = Llama()
        start = sum(layers[:stage])
        self.embedding = whole.embedding if stage == 0 else None
        self.layers = whole.layers[start : start + layers[stage]]
        self.end = nn.Sequential(whole.norm, whole.head) if stage == len(layers) - 1 else None

    def forward(self, value: Tensor) -> Tensor:
        hidden = value if self.embedding is None else self.embedding(value)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden if self.end is None else self.end(hidden)


def a_batch() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def token_loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    labels = batch["labels"]
    return cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()
