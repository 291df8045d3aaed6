"""What programs of users are made of, and the table in which they are."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, WIDTH, HIDDEN, LENGTH = 32, 16, 24, 6

Loss = Callable[[Any, dict[str, Tensor]], Tensor]


def entropy(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """The cross entropy as everybody writes it."""
    scores = output.logits if hasattr(output, "logits") else output
    return functional.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())


def tokens() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {name: torch.randint(WORDS, (4, LENGTH)) for name in ("ids", "labels")}


class Feed(nn.Module):
    """Two layers, and what is written between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.relu, *, reads: int = HIDDEN) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(reads, WIDTH)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))


class Model(nn.Module):
    """An embedding, blocks with residuals, and a head."""

    def __init__(self, make: Callable[[], nn.Module] = Feed, *, num_blocks: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def features(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.features(ids))


@dataclass(kw_only=True)
class Program:
    """What a user wrote. `whole`: layers that are to stay whole, by a part of their names; `refused`: what is said;
    `warns`: what the one warning begins with, if it is not of layers that stay whole."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Loss] = lambda _: entropy
    batch: Callable[[], dict[str, Tensor]] = tokens
    whole: tuple[str, ...] = ()
    refused: str = ""
    warns: str = ""
    plan: str = "tp=2"
    options: dict[str, Any] = field(default_factory=dict)
    #: Looks at what training has left: of the whole run, and of the one in parts.
    left: Callable[[nn.Module, Any], None] | None = None


PROGRAMS: dict[str, Program] = {}


def program(name: str, make: Callable[[], nn.Module], **rest: Any) -> None:
    assert name not in PROGRAMS, name
    PROGRAMS[name] = Program(make=make, **rest)
