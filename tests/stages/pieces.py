"""Hand-made stages, for tests of what runs them: blocks in a row, a skip from the first to the last, a tied weight."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.stages.stage import Batch, Split, Values


class Net(nn.Module):
    """Embedding, blocks, and a head that is tied to the embedding; the last block also reads the first's output."""

    def __init__(self, num_blocks: int, width: int = 8, vocabulary: int = 11) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(num_blocks)
        )

    def block(self, number: int, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.blocks[number](hidden))

    def head(self, hidden: Tensor, skipped: Tensor) -> Tensor:
        return (hidden + skipped) @ self.embedding.weight.T

    def forward(self, ids: Tensor) -> Tensor:
        skipped = hidden = self.block(0, self.embedding(ids))
        for number in range(1, len(self.blocks)):
            hidden = self.block(number, hidden)
        return self.head(hidden, skipped)


class Piece:
    """One block of the net as a stage."""

    def __init__(self, net: Net, number: int) -> None:
        self.net, self.number = net, number
        self.last = number == len(net.blocks) - 1
        mine = [f"blocks.{number}."] + (["embedding."] if number == 0 or self.last else [])
        self.parameters: Mapping[str, nn.Parameter] = {
            name: each for name, each in net.named_parameters() if name.startswith(tuple(mine))
        }
        self.buffers: Mapping[str, Tensor] = {}

    def run(self, values: Values, batch: Batch) -> tuple[Values, Any]:
        hidden = self.net.embedding(batch["ids"]) if self.number == 0 else values[f"hidden{self.number - 1}"]
        hidden = self.net.block(self.number, hidden)
        if self.last:
            return {}, self.net.head(hidden, hidden if self.number == 0 else values["hidden0"])
        return {f"hidden{self.number}": hidden}, None


def cut_by_hand(net: Net) -> Split:
    count = len(net.blocks)
    reads: list[tuple[str, ...]] = [(f"hidden{number - 1}",) if number else () for number in range(count)]
    if count > 2:
        reads[-1] = ("hidden0", f"hidden{count - 2}")
    return Split(
        stages=tuple(Piece(net, number) for number in range(count)),
        reads=tuple(reads),
        writes=tuple((f"hidden{number}",) if number < count - 1 else () for number in range(count)),
        makers={f"hidden{number}": number for number in range(count - 1)},
        ties={"embedding.weight": (0, count - 1)} if count > 1 else {},
        units=tuple((f"blocks.{number}",) for number in range(count)),
    )
