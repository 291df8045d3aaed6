"""Small modules that do what real ones do and splitters stumble over, each one thing."""

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8


def rows(num_rows: int = 3, seed: int = 1) -> Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(x))))  # type: ignore[no-any-return]


class Chain(nn.Module):
    """Blocks in a row."""

    def __init__(self, num_blocks: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class WeightsInGlue(Chain):
    """As a ViT is often written: weights of the root's own, and a head that is the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.first = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.places = nn.Parameter(torch.randn(1, 32, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = torch.cat([self.first.expand(len(ids), -1, -1), x], dim=1)
        x = super().forward(x + self.places[:, : x.shape[1]])
        return nn.functional.linear(x, self.embed.weight)


class InPlace(Chain):
    """Glue that writes into what units returned, before others have read it."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        second = self.blocks[1](first)
        second += first
        third = self.blocks[2](second)
        before = third * 3.0
        third.view(-1)[::2].mul_(2.0)
        return self.blocks[3](third + before) + second  # type: ignore[no-any-return]


class OverwritesItsArgument(nn.Module):
    """A unit that begins in place, as after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(nn.functional.relu(x, inplace=True))  # type: ignore[no-any-return]


class Shared(nn.Module):
    """One block that is called again and again, with one that is not between."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.other = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(self.other(self.block(x))))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """A unit of torch's own that returns a nest of tensors, and states that outlive it."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.recurrent, self.out = nn.Linear(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH, 2), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden, (_, cell) = self.recurrent(self.into(x))
        return self.out(hidden), cell


class Decides(Chain):
    """What is done depends on what a unit returned."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        scale = 2.0 if bool(x.sum() > 0) else 0.5
        counts = (x[:, :2] > 0).tolist()
        x = self.blocks[1](x)
        x = self.blocks[2](x * scale)
        return self.blocks[3](x * (1 + sum(map(sum, counts))))  # type: ignore[no-any-return]


class Skips(Chain):
    """Which unit is called depends on the data."""

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        for number, block in enumerate(self.blocks):
            if not (skip and number == 2):
                x = block(x)
        return x


class Noisy(Chain):
    """Random numbers in glue, used early and late."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        x = self.blocks[0](x + noise)
        return self.blocks[3](self.blocks[2](self.blocks[1](x)) - noise)  # type: ignore[no-any-return]


class Telling(Block):
    """A block that leaves something behind on itself instead of returning it."""

    left: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.left = self.up(x)
        return x + self.down(self.left)  # type: ignore[no-any-return]


class Overheard(nn.Module):
    """A module that picks up what its blocks left behind."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Telling() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        left = self.blocks[1].left
        assert isinstance(left, Tensor)
        return x, left.mean()


class Manners(nn.Module):
    """Several inputs and outputs, things that are no tensors, keyword-only arguments."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, mask: Tensor | None, *, scale: float, tag: str) -> dict[str, Any]:
            y = self.linear(x) * scale
            return {
                "x": y if mask is None else y.masked_fill(mask, 0.0),
                "mask": mask,
                "tag": tag + "!",
                "rest": (y, 3),
            }

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(self.Step() for _ in range(4))

    def forward(self, x: Tensor, /, y: Tensor, mask: Tensor | None = None, *, scale: float = 0.5) -> Any:
        tag = ""
        for step in self.steps:
            done = step(x, mask, scale=scale, tag=tag)
            x, mask, tag = done["x"] + y, done["mask"], done["tag"]
        return {"x": x, "sum": done["rest"][0].sum(), "tag": tag, "mask": mask}
