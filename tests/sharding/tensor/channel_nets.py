"""Blocks with something unusual between or beside their linear layers. Ranks import this."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.sharding.tensor.programs import Attention


class Tempered(Attention):
    """Attention with a temperature for each head."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width, num_heads, num_heads, 4)
        self.temperature = nn.Parameter(torch.rand(num_heads, 1, 1))
        self.drop = _Scaled(self)


class _Scaled(nn.Module):
    """Stands where weights are dropped."""

    def __init__(self, attention: Tempered) -> None:
        super().__init__()
        self.temperature = attention.temperature

    def forward(self, weights: Tensor) -> Tensor:
        return weights * self.temperature


class Feed(nn.Module):
    def __init__(self, width: int, hidden: int, between: str) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * hidden if between == "glu" else hidden)
        self.down = nn.Linear(hidden, width)
        self.scale, self.between = nn.Parameter(torch.rand(hidden)), BETWEEN[between]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.between(self.up(x), self.scale))
        return out


#: From the outputs of the first layer, and a parameter with a number for each, to what the second reads.
BETWEEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a number for each channel": lambda hidden, scale: (hidden * scale).relu(),
    "one that is moved first": lambda hidden, scale: functional.prelu(hidden.mT, scale).mT,
    "glu": lambda hidden, _: functional.glu(hidden),
    "a norm of all tokens": lambda hidden, _: hidden * hidden.norm(dim=1, keepdim=True),
    "several at once": lambda hidden, _: hidden.relu().square() + hidden.clamp(-1, 1).sin(),
    "nothing that keeps channels apart": lambda hidden, _: hidden.sort(-1).values,
}


class Block(nn.Module):
    def __init__(self, num_heads: int, hidden: int, between: str, beside: nn.Module | None) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention, self.feed = Tempered(16, num_heads), Feed(16, hidden, between)
        self.beside = beside

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        if self.beside is not None:
            x = x + self.beside(x.mT).mT
        out: Tensor = x + self.feed(self.second(x))
        return out


#: What a block computes along tokens, of (batch, channels, tokens).
BESIDE: dict[str, Callable[[], nn.Module]] = {
    "a convolution": lambda: nn.Conv1d(16, 16, 3, padding=1),
    "a norm of groups": lambda: nn.GroupNorm(4, 16),
}


class Net(nn.Module):
    def __init__(self, num_heads: int, hidden: int, between: str, beside: str | None) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(97, 16), nn.Linear(16, 97, bias=False)
        self.head.weight = self.words.weight
        made = [None if beside is None else BESIDE[beside]() for _ in range(2)]
        self.blocks = nn.ModuleList(Block(num_heads, hidden, between, each) for each in made)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x)
        return scores


def net(between: str, beside: str | None = None, num_heads: int = 5) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    module = Net(num_heads, 25, between, beside)
    return module, {name: torch.randint(97, (2, 7)) for name in ("tokens", "labels_")}


class Rigid(nn.Module):
    """Counts on all of its channels, in a way that no run without cuts shows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).view(-1, 3, 4).relu().view(-1, 12))
        return out


def rigid() -> tuple[nn.Module, dict[str, Tensor]]:
    return nn.Sequential(Rigid(), nn.ReLU()), {"input": torch.randn(2, 8)}


def with_head_parameters(family: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Models of Hugging Face whose attention has parameters for each head: sinks, and norms of queries and keys."""
    import transformers as hf  # Only ranks that need it import it.

    from tests.stages.families import GATED, MOE

    torch.manual_seed(0)
    if family == "gpt-oss":
        config: hf.PretrainedConfig = hf.GptOssConfig(**MOE, num_hidden_layers=2, head_dim=8, sliding_window=6)
    else:
        config = hf.CohereConfig(**GATED, num_hidden_layers=2, use_qk_norm=True)
    module: nn.Module = hf.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for each in module.parameters():
            each.add_(0.1 * torch.randn_like(each))
    return module, {"input_ids": torch.randint(3, 97, (2, 7)), "labels_": torch.randint(97, (2, 7))}
