"""Blocks that look alike and are not: what a list, a number of theirs or a call says, in the middle of many."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tests.habits.tensor_models import HIDDEN, WIDTH, Feed, Model, program
from tests.habits.tensor_widths import Attention


class Named(Model):
    """Blocks by names, and not by numbers."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__(num_blocks=0)
        self.named = nn.ModuleDict({name: make() for name in ("first", "second", "third", "last")})

    def features(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.named.values():
            x = x + block(x)
        return self.norm(x)


class Listed(Feed):
    """What it does between its layers is in a dictionary."""

    def __init__(self, how: dict[str, Any]) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        return self.down(h / math.sqrt(h.shape[-1]) if self.how["divides"] else h)


class Numbered(Feed):
    """Every other block does something else, by its place."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.layer_idx = place

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        return self.down(h.roll(3, -1) if self.layer_idx % 4 == 1 else h)


class Told(Feed):
    """What it does is said when it is called."""

    def forward(self, x: Tensor, divides: bool = False) -> Tensor:
        h = torch.relu(self.up(x))
        return self.down(h / h.shape[-1] if divides else h)


class Telling(Model):
    def features(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for place, block in enumerate(self.blocks):
            x = x + block(x, divides=place == 1)
        return self.norm(x)


class Chain(Model):
    """Layers in one list, and what is between them in another."""

    def __init__(self, between: list[Callable[[Tensor], Tensor]]) -> None:
        super().__init__(num_blocks=0)
        widths = [WIDTH, HIDDEN, WIDTH, HIDDEN, WIDTH, HIDDEN, WIDTH]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.between = between

    def features(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer, between in zip(self.layers, self.between, strict=True):
            x = between(layer(x))
        return self.norm(x)


def _blocks(make: Callable[[int], nn.Module], count: int = 4) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = Model(num_blocks=0)
        model.blocks = nn.ModuleList(make(place) for place in range(count))
        return model

    return made


def _divided(h: Tensor) -> Tensor:
    return h.relu() / math.sqrt(h.shape[-1])


BOTH = ("up", "down")
program("blocks by names, with heads in nhead", lambda: Named(lambda: Attention("nhead")))
program("blocks by names, with heads in a literal", lambda: Named(lambda: Attention("literal")), whole=("qkv", "out"))
program(
    "the second block is told otherwise by a dictionary", _blocks(lambda at: Listed({"divides": at == 1})), whole=BOTH
)
program("the second block rolls, by its number", _blocks(Numbered), whole=BOTH)
program("the second block is called otherwise", lambda: Telling(Told, num_blocks=4), whole=BOTH)
program(
    "a chain of layers, of which one pair is divided by its width",
    lambda: Chain([torch.relu, torch.tanh, _divided, torch.tanh, torch.relu, torch.tanh]),
    whole=("layers.2", "layers.3"),
)
