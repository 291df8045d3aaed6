"""What blocks are made of: each takes and gives [batch, tokens, 16]. `KINDS` has all, with the choices each leaves."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.habits.drawn import attentions
from tests.habits.drawn.attentions import WIDTH, Attention
from tests.habits.drawn.channels import HALF, SAME
from tests.habits.drawn.library import Between, Library

HIDDEN = 24


class Feed(nn.Module):
    """Two layers, and what is done between them."""

    def __init__(self, *, gate: str, first: str, second: str, bias: bool, around: str) -> None:
        super().__init__()
        self.gate, self.first, self.second, self.around = gate, first, second, around
        self.up = nn.Linear(WIDTH, HIDDEN if gate == "none" else 2 * HIDDEN, bias=bias)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=bias)
        self.drop = nn.Dropout(0.0)

    def _inner(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.gate != "none":
            h = HALF[self.gate](h)
        for each in (self.first, self.second):
            if each != "none":
                h = SAME[each](h)
        return self.drop(self.down(h))

    def forward(self, x: Tensor) -> Tensor:
        if self.around == "checkpoint":
            return checkpoint(self._inner, x, use_reentrant=False)
        if self.around == "reentrant":
            return checkpoint(self._inner, x, use_reentrant=True)
        if self.around == "twice":
            return self._inner(self._inner(x) * 0.5)
        if self.around == "rows":
            return self._inner(x.reshape(-1, WIDTH)[None]).view_as(x) if not self._sees_tokens() else self._inner(x)
        return self._inner(x)

    def _sees_tokens(self) -> bool:
        return any("token" in each or each == "in groups of four" for each in (self.first, self.second))


class Gated(nn.Module):
    """A layer for the gate, one for what goes through, one back."""

    def __init__(self, *, act: str, joined: str) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.act, self.joined = act, joined

    def forward(self, x: Tensor) -> Tensor:
        gate, up = SAME[self.act](self.w1(x)), self.w3(x)
        if self.joined == "sum":
            return self.w2(gate + up)
        if self.joined == "max":
            return self.w2(torch.maximum(gate, up))
        if self.joined == "lerp":
            return self.w2(torch.lerp(gate, up, 0.3))
        if self.joined == "in place":
            gate = gate * 1.0
            gate *= up
            return self.w2(gate)
        return self.w2(gate * up)


class Direct(nn.Module):
    """Parameters of its own, used by functions."""

    def __init__(self, *, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.randn(HIDDEN, WIDTH) / 4)
        self.back = nn.Parameter(torch.randn(HIDDEN, WIDTH) / 5)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "linear":
            h = functional.linear(x, self.weight, self.bias)
        elif self.how == "matmul":
            h = x @ self.weight.T + self.bias
        elif self.how == "einsum":
            h = torch.einsum("btc,hc->bth", x, self.weight)
        elif self.how == "addmm":
            h = torch.addmm(self.bias, x.flatten(0, 1), self.weight.t()).view(*x.shape[:2], -1)
        elif self.how == "layer_norm":
            h = functional.linear(functional.layer_norm(x, (WIDTH,), self.scale, None), self.weight)
        else:
            h = functional.linear(x, self.weight / self.weight.norm(dim=1, keepdim=True), self.bias)
        return (torch.tanh(h) @ self.back) * self.scale


class Norm(nn.Module):
    """A norm of any kind, as it is used on tokens."""

    def __init__(self, *, kind: str) -> None:
        super().__init__()
        self.kind = kind
        makes: dict[str, Callable[[], nn.Module]] = {
            "layer": lambda: nn.LayerNorm(WIDTH),
            "rms": lambda: nn.RMSNorm(WIDTH),
            "group": lambda: nn.GroupNorm(4, WIDTH),
            "instance": lambda: nn.InstanceNorm1d(WIDTH, affine=True),
            "batch": lambda: nn.BatchNorm1d(WIDTH),
            "no affine": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
            "by hand": lambda: nn.Identity(),
        }
        self.norm = makes[kind]()
        if kind == "by hand":
            self.g = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind in ("group", "instance", "batch"):
            return self.norm(x.transpose(1, 2)).transpose(1, 2)
        if self.kind == "by hand":
            return self.norm(x) * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt() * self.g
        return self.norm(x)


class Torch(nn.Module):
    """Layers of torch that are many in one."""

    def __init__(self, *, kind: str) -> None:
        super().__init__()
        self.kind = kind
        makes: dict[str, Callable[[], nn.Module]] = {
            "mha": lambda: nn.MultiheadAttention(WIDTH, 4, batch_first=True),
            "mha weights": lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True, bias=False),
            "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 4, HIDDEN, 0.0, batch_first=True, norm_first=True),
            "encoder post": lambda: nn.TransformerEncoderLayer(WIDTH, 2, HIDDEN, 0.0, batch_first=True),
            "gru": lambda: nn.GRU(WIDTH, WIDTH, batch_first=True),
            "lstm": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
            "conv": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
            "conv depthwise": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH),
            "conv one": lambda: nn.Conv1d(WIDTH, WIDTH, 1),
            "bilinear": lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH),
            "prelu": lambda: nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.PReLU(), nn.Linear(HIDDEN, WIDTH)),
            "sequential": lambda: nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)),
            "deep": lambda: nn.Sequential(
                nn.Linear(WIDTH, HIDDEN), nn.ReLU(inplace=True), nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN),
                nn.SiLU(), nn.Linear(HIDDEN, WIDTH),
            ),
            "linear": lambda: nn.Linear(WIDTH, WIDTH),
        }  # fmt: skip
        self.inner = makes[kind]()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "mha":
            return self.inner(x, x, x, need_weights=False)[0]
        if self.kind == "mha weights":
            later = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
            return self.inner(x, x, x, attn_mask=later)[0]
        if self.kind in ("gru", "lstm"):
            return self.inner(x)[0]
        if self.kind.startswith("conv"):
            return self.inner(x.transpose(1, 2)).transpose(1, 2)
        if self.kind == "bilinear":
            return self.inner(x, x.flip(-1)) * 0.3
        return self.inner(x)


class Tokens(nn.Module):
    """What mixes tokens without attention."""

    def __init__(self, *, how: str) -> None:
        super().__init__()
        self.how = how
        self.mix = nn.Linear(8, 8)
        self.squeeze = nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, WIDTH), nn.Sigmoid())
        self.places = nn.Embedding(8, WIDTH)
        self.table = nn.Parameter(torch.randn(1, 8, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "mixer":
            return self.mix(x.transpose(1, 2)).transpose(1, 2)
        if self.how == "squeeze and excite":
            return x * self.squeeze(x.mean(1))[:, None]
        if self.how == "positions":
            return x + self.places(torch.arange(x.shape[1]))
        if self.how == "table":
            return x + self.table[:, : x.shape[1]]
        if self.how == "fft":
            return torch.fft.fft(x, dim=1).real / 3
        if self.how == "shift":
            return torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1).to(x)[:, None]


class Shared(nn.Module):
    """One layer called more than once, and containers."""

    def __init__(self, *, how: str) -> None:
        super().__init__()
        self.how = how
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleDict({"a": nn.Linear(WIDTH, HIDDEN), "b": nn.Linear(HIDDEN, WIDTH)})
        self.list = nn.ModuleList([nn.Linear(WIDTH, 8) for _ in range(2)])
        self.numbers = nn.ParameterList([nn.Parameter(torch.full((WIDTH,), 0.5)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "twice":
            return self.layer(torch.tanh(self.layer(x)))
        if self.how == "dict":
            return self.parts["b"](functional.silu(self.parts["a"](x)))
        if self.how == "list":
            return torch.cat([each(x) for each in self.list], -1)
        if self.how == "numbers":
            return self.layer(x * self.numbers[0]) + self.numbers[1]
        if self.how == "transposed":
            return functional.linear(functional.relu(self.parts["a"](x)), self.parts["a"].weight.t())
        return self.layer(x) + functional.linear(x, self.layer.weight.t())


class Buffers(nn.Module):
    """Buffers that are read, and some that are written."""

    def __init__(self, *, how: str) -> None:
        super().__init__()
        self.how = how
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.ones(HIDDEN) > 0, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "counted" and self.training:
            self.calls += 1
        if self.how == "counted and read":
            if self.training:
                self.calls.add_(1)
            return self.layer(x) / (1 + 0.1 * self.calls)
        if self.how == "running":
            if self.training:
                self.scale.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
            return self.layer(x)
        return self.layer(x * self.scale) * self.mask[:WIDTH]


class Experts(nn.Module):
    """Experts by hand, in one matrix for all or in modules."""

    def __init__(self, *, how: str) -> None:
        super().__init__()
        self.how = how
        self.router = nn.Linear(WIDTH, 4, bias=False)
        if how == "stacked":
            self.w1 = nn.Parameter(torch.randn(4, WIDTH, HIDDEN) / 4)
            self.w2 = nn.Parameter(torch.randn(4, HIDDEN, WIDTH) / 5)
        else:
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(4)
            )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        if self.how == "stacked":
            hidden = torch.einsum("btc,ech->bteh", x, self.w1).relu()
            return torch.einsum("bteh,ehc,bte->btc", hidden, self.w2, weights)
        if self.how == "all":
            return sum(weights[..., i : i + 1] * each(x) for i, each in enumerate(self.experts))
        best, which = weights.max(-1)
        made = torch.zeros_like(x)
        for i, each in enumerate(self.experts):
            chosen = which == i
            made[chosen] = each(x[chosen]) * best[chosen][:, None]
        return made


class StackedExperts(nn.Module):
    """Experts as transformers has them since 5.0: tokens, the experts chosen and their weights."""

    def __init__(self, *, form: str) -> None:
        super().__init__()
        self.num_experts, self.form = 4, form
        self.up = nn.Parameter(torch.randn(4, HIDDEN, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(4, WIDTH, HIDDEN) / 5)

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        made = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            row, place = torch.where(chosen == expert)
            hidden = functional.silu(functional.linear(tokens[row], self.up[expert]))
            if self.form == "weights inside":
                part = functional.linear(hidden * weights[row, place, None], self.down[expert])
            else:
                part = functional.linear(hidden, self.down[expert]) * weights[row, place, None]
            if self.form == "not a sum":
                part = torch.tanh(part)
            made.index_add_(0, row, part.to(made.dtype))
        return made


class Mixture(nn.Module):
    """A router over such experts."""

    def __init__(self, *, form: str, top: int) -> None:
        super().__init__()
        self.top = top
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = StackedExperts(form=form)
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.router(flat).softmax(-1).topk(self.top, -1)
        return self.experts(flat, chosen, weights).view_as(x) + self.shared(x)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How an operation is made, what may be chosen (the simplest first), and how often it is drawn."""

    make: Callable[..., nn.Module]
    choices: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    weight: int = 2
    #: Whether tokens may see each other other than by torch's attention, by what was chosen.
    mixes: Callable[[dict[str, Any]], bool] = lambda _: False


_TOKENWISE = tuple(name for name in SAME if "token" not in name and name != "in groups of four")
_ALONE = ("relu", "gelu", "tanh", "square", "silu", "clamp", "in-place relu", "add_", "where", "half of it")


def _mixes_channels(how: dict[str, Any]) -> bool:
    return how["first"] not in (*_TOKENWISE, "none") or how["second"] not in (*_TOKENWISE, "none")


KINDS: dict[str, Kind] = {
    "Feed": Kind(
        make=Feed,
        choices={
            "gate": ("none", "none", *HALF),
            "first": ("none", *_ALONE, *SAME),
            "second": ("none", "none", "none", *SAME),
            "bias": (True, False),
            "around": ("nothing", "nothing", "nothing", "checkpoint", "reentrant", "twice", "rows"),
        },
        weight=6,
        mixes=_mixes_channels,
    ),
    "Attention": Kind(
        make=Attention, choices=attentions.CHOICES, weight=5,
        mixes=lambda how: (
            how["scores"] != "sdpa" or how["mask"] in ("buffer", "additive")
            or how["extra"] in ("temperature", "slopes", "talking heads", "rotary")
        ),
    ),
    "Gated": Kind(make=Gated, choices={"act": _ALONE, "joined": ("product", "sum", "max", "lerp", "in place")}),
    "Direct": Kind(
        make=Direct, choices={"how": ("linear", "matmul", "einsum", "addmm", "layer_norm", "weight norm by hand")}
    ),
    "Norm": Kind(
        make=Norm, choices={"kind": ("layer", "rms", "group", "instance", "batch", "no affine", "by hand")},
        mixes=lambda how: how["kind"] in ("group", "instance", "batch"),
    ),
    "Torch": Kind(
        make=Torch,
        choices={"kind": (
            "linear", "mha", "mha weights", "encoder", "encoder post", "gru", "lstm", "conv", "conv depthwise",
            "conv one", "bilinear", "prelu", "sequential", "deep",
        )},
        weight=4,
        mixes=lambda how: how["kind"] not in ("linear", "conv one", "bilinear", "prelu", "sequential", "deep"),
    ),
    "Tokens": Kind(
        make=Tokens,
        choices={"how": ("positions", "table", "mixer", "squeeze and excite", "fft", "shift", "running mean")},
        weight=1,
        mixes=lambda _: True,
    ),
    "Shared": Kind(
        make=Shared, choices={"how": ("dict", "twice", "list", "numbers", "transposed", "and its transpose")}
    ),
    "Buffers": Kind(make=Buffers, choices={"how": ("read", "counted", "counted and read", "running")}, weight=1),
    "Experts": Kind(make=Experts, choices={"how": ("all", "stacked", "the best")}, weight=1),
    "Between": Kind(
        make=Between, choices={"how": Between.HOW}, weight=3,
        mixes=lambda how: how["how"] in ("batch norm", "conv over tokens", "depthwise", "gru", "embedding of places"),
    ),
    "Library": Kind(
        make=Library, choices={"how": Library.HOW}, weight=4,
        mixes=lambda how: how["how"] in (
            "timm attention", "attention without view", "cross attention", "pooled", "rotated", "gated mean", "encoder",
        ),
    ),
    "Mixture": Kind(
        make=Mixture, weight=1,
        choices={"form": ("plain", "plain", "weights inside", "weights inside", "plain", "not a sum"), "top": (1, 2)},
    ),
}  # fmt: skip
