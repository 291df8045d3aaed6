"""Constants of the whole width, and numbers of heads, in what stands between layers that are cut."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.habits.tensor_models import HIDDEN, LENGTH, WIDTH, WORDS, Feed, Model, program


def feed(name: str, between: Callable[[Tensor], Tensor], *, reads: int = HIDDEN, whole: tuple[str, ...] = ()) -> None:
    program(name, lambda: Model(lambda: Feed(between, reads=reads), num_blocks=2 if whole else 1), whole=whole)


ALL_OF_FEED = ("up", "down")


def _first_half_gates(h: Tensor) -> Tensor:
    return h[..., :12].sigmoid() * h[..., 12:]


def _negate_first(h: Tensor) -> Tensor:
    return torch.cat([-h[..., :8], h[..., 8:]], -1)


feed("the root of the number of channels", lambda h: h.relu() / math.sqrt(h.shape[-1]), whole=ALL_OF_FEED)
feed("one number for the number of channels", lambda h: h.tanh() * (8 / h.size(-1)), whole=ALL_OF_FEED)
feed("half of the channels gate the others", _first_half_gates, reads=12, whole=ALL_OF_FEED)
feed("half of the channels, by chunks", lambda h: math.prod(h.chunk(2, -1)), reads=12)  # type: ignore[arg-type]
feed("some channels are negated", _negate_first, whole=ALL_OF_FEED)
feed("channels are rolled", lambda h: h.relu().roll(5, -1), whole=ALL_OF_FEED)
feed("channels are flipped", lambda h: h.relu().flip(-1))
feed("a mean over groups of eight", lambda h: h.unflatten(-1, (-1, 8)).mean(-2), reads=8, whole=ALL_OF_FEED)
feed("a mean inside of groups of eight", lambda h: h.unflatten(-1, (-1, 8)).mean(-1), reads=3)
feed("a softmax over channels", lambda h: h.softmax(-1), whole=ALL_OF_FEED)
feed("a mean that is taken off", lambda h: h - h.mean(-1, keepdim=True), whole=ALL_OF_FEED)
feed("the largest channels only", lambda h: h * (h >= h.topk(4, -1).values[..., -1:]), whole=ALL_OF_FEED)
feed("a ramp over channels", lambda h: h * torch.linspace(0, 1, h.shape[-1], dtype=h.dtype), whole=ALL_OF_FEED)
feed("numbers of channels in float", lambda h: h * torch.arange(h.shape[-1]).float().cos(), whole=ALL_OF_FEED)
feed("every second channel", lambda h: h[..., ::2].relu(), reads=12, whole=ALL_OF_FEED)
feed("an interleaved gate", lambda h: h[..., ::2] * h[..., 1::2].sigmoid(), reads=12)
feed("a softplus and a square", lambda h: functional.softplus(h).square())
feed("a maxout", lambda h: h.unflatten(-1, (12, 2)).amax(-1), reads=12, whole=ALL_OF_FEED)


def unseeded() -> dict[str, Tensor]:
    """The same rows each time; `tokens` sets torch's seed."""
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(WORDS, (4, LENGTH), generator=generator) for name in ("ids", "labels")}


def drawn(name: str, between: Callable[[Tensor], Tensor]) -> None:
    program(name, lambda: Model(lambda: Feed(between), num_blocks=2), batch=unseeded, whole=ALL_OF_FEED)


drawn("rows left out at random", lambda h: h * (torch.rand(len(h), 1, 1) < 0.7))
drawn("a gain of each token at random", lambda h: h * (1 + torch.randn(h.shape[:2]))[..., None])
drawn("one number at random", lambda h: h.relu() + torch.randn(()))


class Attention(nn.Module):
    """Attention as in tutorials. What the head count is called is up to who writes it."""

    def __init__(self, style: str = "num_heads") -> None:
        super().__init__()
        self.style, self.heads_are_four = style, True
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.d_k = WIDTH // 4
        if style in ("num_heads", "nhead", "H"):
            setattr(self, style, 4)
        if style == "scale":
            self.num_heads, self.embed_dim = 4, WIDTH

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.style == "literal width":
            q, k, v = (each.view(batch, length, -1, 4).transpose(1, 2) for each in (q, k, v))
        elif self.style == "literal":
            q, k, v = (each.view(batch, length, 4, -1).transpose(1, 2) for each in (q, k, v))
        elif self.style == "scale":
            q, k, v = (each.view(batch, length, -1, self.d_k).transpose(1, 2) for each in (q, k, v))
        else:
            heads = getattr(self, self.style)
            q, k, v = (each.view(batch, length, heads, -1).transpose(1, 2) for each in (q, k, v))
        width = self.embed_dim // self.num_heads if self.style == "scale" else q.shape[-1]
        scores = (q @ k.mT) / math.sqrt(width)
        mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class SeparateAttention(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.name = name
        setattr(self, name, 4)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = getattr(self, self.name)
        q, k, v = (layer(x).view(batch, length, heads, width // heads) for layer in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(batch, length, width))


class Norms(nn.Module):
    """A norm over the channels of each head, whose number is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.GroupNorm(4, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(self.norm(h.flatten(0, 1)).view_as(h))


program("heads in num_heads", lambda: Model(Attention))
program("heads in nhead", lambda: Model(lambda: Attention("nhead")))
program("heads in H", lambda: Model(lambda: Attention("H")))
program("heads as a literal", lambda: Model(lambda: Attention("literal")), whole=("qkv", "out"))
program("widths of heads as a literal", lambda: Model(lambda: Attention("literal width")))
program("a scale of embed_dim // num_heads", lambda: Model(lambda: Attention("scale")))
program("width // nhead of the input", lambda: Model(lambda: SeparateAttention("nhead")), whole=("q", "k", "v", "o"))
program("width // heads of the input", lambda: Model(lambda: SeparateAttention("heads")), whole=("q", "k", "v", "o"))
program("a norm of groups of channels", lambda: Model(Norms), whole=ALL_OF_FEED)


class TorchAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


program("nn.MultiheadAttention", lambda: Model(TorchAttention), whole=("out_proj",))
program(
    "nn.TransformerEncoderLayer",
    lambda: Model(lambda: nn.TransformerEncoderLayer(WIDTH, 4, HIDDEN, dropout=0.0, batch_first=True)),
    whole=("out_proj",),
)


class Grouped(nn.Module):
    """Keys of fewer heads than queries, under names that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.h_q, self.h_kv = 4, 2
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.h_q, -1).transpose(1, 2)
        k, v = (layer(x).view(batch, length, self.h_kv, -1).transpose(1, 2) for layer in (self.k, self.v))
        times = self.h_q // self.h_kv
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        return self.o(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Biased(nn.Module):
    """A bias of each head, made in forward for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (-1, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        slopes = 0.5 ** torch.arange(1, q.shape[1] + 1).to(x)
        places = torch.arange(x.shape[1]).to(x)
        scores = q @ k.mT / 2 - slopes[:, None, None] * (places[:, None] - places).abs()
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


program("fewer key heads under unknown names", lambda: Model(Grouped), whole=("q", "k", "v", "o"))
program("a slope for each head", lambda: Model(Biased), whole=("qkv", "out"))


class InBlock(nn.Module):
    """A block with attention or a feed-forward layer, and another that can be cut."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner, self.feed = nn.LayerNorm(WIDTH), inner, Feed()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed(self.inner(self.norm(x)))


class Chain(Model):
    """Blocks with their residuals inside, so that sequences can be shared out between them."""

    def features(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def _rooted(h: Tensor) -> Tensor:
    return h.relu() / math.sqrt(h.shape[-1])


SHARED = {"plan": "tp=2,sp=true"}
program(
    "heads in nhead, and shared sequences", lambda: Chain(lambda: InBlock(Attention("nhead")), num_blocks=2), **SHARED
)
program(
    "the root of the width, and shared sequences",
    lambda: Chain(lambda: InBlock(Feed(_rooted)), num_blocks=2),
    whole=("inner.up", "inner.down"),
    **SHARED,
)
program(
    "residuals around blocks, and shared sequences",
    lambda: Model(lambda: InBlock(Feed()), num_blocks=2),
    warns="sp=true shares out nothing, since with a part of the tokens",
    **SHARED,
)
