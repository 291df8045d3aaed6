"""Operations as libraries and their users write them: each takes and gives [batch, tokens, 16]."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.habits.drawn.attentions import HEADS, WIDTH

HIDDEN = 24


class Between(nn.Module):
    """Two layers, and a module or parameters of its own between them."""

    HOW = (
        "prelu", "group norm", "layer norm", "rms norm", "batch norm", "snake", "conv over tokens", "depthwise",
        "conv over channels", "kron", "heads by einsum", "heads by bmm", "mask", "the largest scattered", "gather",
        "gru", "powers", "grouped", "embedding of places",
    )  # fmt: skip

    def __init__(self, *, how: str) -> None:
        super().__init__()
        self.how = how
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        makes: dict[str, Any] = {
            "prelu": lambda: nn.PReLU(HIDDEN),
            "group norm": lambda: nn.GroupNorm(4, HIDDEN),
            "layer norm": lambda: nn.LayerNorm(HIDDEN),
            "rms norm": lambda: nn.RMSNorm(6),
            "batch norm": lambda: nn.BatchNorm1d(HIDDEN),
            "conv over tokens": lambda: nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1),
            "depthwise": lambda: nn.Conv1d(HIDDEN, HIDDEN, 3, padding=2, groups=HIDDEN),
            "conv over channels": lambda: nn.Conv1d(1, 1, 3, padding=1),
            "gru": lambda: nn.GRU(HIDDEN, HIDDEN // 2, batch_first=True, bidirectional=True),
            "grouped": lambda: nn.Conv1d(HIDDEN, HIDDEN, 1, groups=4),
            "embedding of places": lambda: nn.Embedding(8, HIDDEN),
        }
        self.inner = makes[how]() if how in makes else nn.Identity()
        self.slope = nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN))
        self.matrix = nn.Parameter(torch.randn(4, 6, 6) * 0.3)
        self.register_buffer("order", torch.arange(HIDDEN).flip(0))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(self._between(self.up(x)))
        return made

    def _between(self, h: Tensor) -> Tensor:
        how, groups = self.how, (*h.shape[:-1], 4, -1)
        if how in ("prelu", "group norm"):
            return self.inner(h.flatten(0, 1)).view_as(h)
        if how == "rms norm":
            return self.inner(h.view(groups)).view_as(h)
        if how in ("batch norm", "conv over tokens", "grouped"):
            return self.inner(h.transpose(1, 2)).transpose(1, 2)
        if how == "depthwise":
            return functional.silu(self.inner(h.transpose(1, 2))[..., : h.shape[1]]).transpose(1, 2)
        if how == "conv over channels":
            return self.inner(h.flatten(0, 1)[:, None])[:, 0].view_as(h)
        if how == "snake":
            return h + torch.sin(self.slope * h) ** 2 / self.slope
        if how == "kron":
            return torch.tanh(h.view(groups) @ self.matrix[0]).flatten(-2)
        if how == "heads by einsum":
            return torch.einsum("btgc,gcd->btgd", h.view(groups), self.matrix).flatten(-2)
        if how == "heads by bmm":
            made = torch.bmm(h.reshape(-1, 4, 6).transpose(0, 1), self.matrix)
            return torch.tanh(made.transpose(0, 1).reshape(h.shape))
        if how == "mask":
            made, chosen = torch.zeros_like(h), h > 0
            made[chosen] = 2 * h[chosen]
            return made
        if how == "the largest scattered":
            values, places = h.topk(5, -1)
            return torch.zeros_like(h).scatter(-1, places, values)
        if how == "gather":
            return torch.tanh(h.gather(-1, self.order.expand(h.shape)))
        if how == "gru":
            return self.inner(h)[0]
        if how == "powers":
            return sum(self.slope[power] * h ** (power + 1) for power in range(3)) / 4
        if how == "embedding of places":
            return torch.tanh(h + self.inner(torch.arange(h.shape[1])))
        return torch.tanh(self.inner(h))


class Adapted(nn.Linear):
    """A layer with a small one beside it, as a class of its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.a, self.b = nn.Parameter(torch.randn(2, inputs) * 0.2), nn.Parameter(torch.randn(outputs, 2) * 0.2)

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, self.weight + self.b @ self.a, self.bias)


class Beside(nn.Module):
    """The same around a layer that is there."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A = nn.Linear(layer.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base_layer(x) + 2.0 * self.lora_B(self.lora_A(x))
        return made


class Library(nn.Module):
    """What PEFT, timm, nanoGPT and trainers of students have in their modules."""

    HOW = (
        "timm attention", "nano attention", "lora around", "lora class", "lora by products", "teacher", "stopped",
        "stochastic depth", "checkpointed", "training only", "transposed weight", "standardised weight", "chosen rows",
        "top two", "pooled", "cross attention", "attention without view", "reversed gradient", "doubled gradient",
        "rotated", "gated mean", "maxout", "ties by function", "encoder", "half frozen",
    )  # fmt: skip

    def __init__(self, *, how: str) -> None:
        super().__init__()
        self.how, self.num_heads, self.head_dim = how, HEADS, WIDTH // HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1: nn.Module = nn.Linear(WIDTH, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(self.head_dim if "attention" in how else WIDTH)
        self.drop = nn.Dropout(0.0)
        if how == "lora around":
            self.fc1 = Beside(nn.Linear(WIDTH, HIDDEN))
        elif how == "lora class":
            self.fc1 = Adapted(WIDTH, HIDDEN)
        elif how == "teacher":
            self.other = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))
            self.other.requires_grad_(False)
        elif how == "top two":
            self.gate = nn.Linear(WIDTH, 4, bias=False)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(4)
            )
        elif how == "encoder":
            layer = nn.TransformerEncoderLayer(WIDTH, 2, HIDDEN, 0.0, activation="gelu", batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        elif how == "half frozen":
            self.fc1.weight.requires_grad_(False)

    def _feed(self, x: Tensor) -> Tensor:
        made: Tensor = self.fc2(self.drop(functional.gelu(self.fc1(x))))
        return made

    def forward(self, x: Tensor) -> Tensor:
        if "attention" in self.how:
            return self._attention(x)
        made = getattr(self, "_" + self.how.replace(" ", "_"), None)
        return self._feed(x) if made is None else made(x)

    def _attention(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        if self.how == "timm attention":
            made = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
            q, k, v = made.unbind(0)
            weights = ((q * self.head_dim**-0.5) @ self.norm(k).transpose(-2, -1)).softmax(dim=-1)
            return self.proj(self.drop(weights @ v).transpose(1, 2).reshape(batch, tokens, width))
        if self.how == "attention without view":
            q, k, v = (each.unflatten(-1, (HEADS, -1)) for each in self.qkv(x).chunk(3, -1))
            weights = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(0.5).softmax(-1)
            return self.proj(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(-2))
        given = x if self.how == "nano attention" else x.flip(1).contiguous()
        q, k, v = self.qkv(x).split(WIDTH, dim=2)
        if self.how == "cross attention":
            _, k, v = self.qkv(given).split(WIDTH, dim=2)
        q, k, v = (each.view(batch, tokens, 4, width // 4).transpose(1, 2) for each in (q, k, v))
        made = functional.scaled_dot_product_attention(q, k, v, is_causal=self.how == "nano attention")
        return self.proj(made.transpose(1, 2).contiguous().view(batch, tokens, width))

    def _lora_by_products(self, x: Tensor) -> Tensor:
        small = self.proj.weight[:2]
        return self.fc2(functional.gelu(self.fc1(x + x @ small.T @ small)))

    def _teacher(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.other(x)
        return self._feed(x) + 0.3 * target

    def _stopped(self, x: Tensor) -> Tensor:
        one, other = self.fc1(x).chunk(2, -1)
        return self.fc2(torch.cat((one.detach() * other, other), -1))

    def _stochastic_depth(self, x: Tensor) -> Tensor:
        keep = x.new_empty((x.shape[0], 1, 1)).bernoulli_(1.0) if self.training else 1.0
        return self._feed(x) * keep

    def _checkpointed(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self._feed, x, use_reentrant=False)
        return made

    def _training_only(self, x: Tensor) -> Tensor:
        return self._feed(x) if self.training else x

    def _transposed_weight(self, x: Tensor) -> Tensor:
        return functional.linear(torch.tanh(functional.linear(x, self.fc2.weight.t())), self.fc2.weight, self.fc2.bias)

    def _standardised_weight(self, x: Tensor) -> Tensor:
        weight = self.proj.weight
        return functional.linear(x, (weight - weight.mean(1, keepdim=True)) / weight.std(1, keepdim=True))

    def _chosen_rows(self, x: Tensor) -> Tensor:
        chosen, made = x[..., 0] > 0, x.clone()
        made[chosen] = self._feed(x[chosen])
        return made

    def _top_two(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, which = self.gate(flat).softmax(-1).topk(2, -1)
        weights, made = weights / weights.sum(-1, keepdim=True), torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(which == number)
            made.index_add_(0, row, expert(flat[row]) * weights[row, place, None])
        return made.view_as(x)

    def _pooled(self, x: Tensor) -> Tensor:
        return torch.tanh(self.proj(x[:, 0]))[:, None].expand_as(x)

    def _reversed_gradient(self, x: Tensor) -> Tensor:
        h = self._feed(x)
        return 2 * h.detach() - h

    def _doubled_gradient(self, x: Tensor) -> Tensor:
        h = self.fc1(x) * 1.0
        if h.requires_grad:
            h.register_hook(lambda gradient: 2 * gradient)
        return self.fc2(torch.tanh(h))

    def _rotated(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.proj(x).float().unflatten(-1, (-1, 2)).contiguous())
        turn = torch.polar(torch.ones(8, 1), torch.arange(8.0)[:, None] * 0.3)[: x.shape[1]]
        return torch.view_as_real(pairs * turn).flatten(-2).to(x)

    def _gated_mean(self, x: Tensor) -> Tensor:
        return self._feed(x) * torch.sigmoid(self.proj(x.mean(1, keepdim=True)))

    def _maxout(self, x: Tensor) -> Tensor:
        return self.proj(self.qkv(x).view(*x.shape[:-1], 3, WIDTH).amax(-2))

    def _ties_by_function(self, x: Tensor) -> Tensor:
        return functional.linear(functional.gelu(self.fc1(x)), self.fc1.weight.t())

    def _encoder(self, x: Tensor) -> Tensor:
        made: Tensor = self.encoder(x)
        return made
