"""Small trainings of a user's own kind, for faults that a transformer has no place for."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from shardwise.parity.problem import Problem
from shardwise.states.muon import Muon
from shardwise.states.parameter_group import Share

ROWS, WIDTH = 8, 8


class Plain(nn.Module):
    """Layers in a row, with what stands between them."""

    def __init__(self, between: Callable[[], nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), between()) for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        found: Tensor = self.head(x)
        return found


class Extra(nn.Module):
    """A layer that is used in some steps, and in others has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, uses: int) -> Tensor:
        return x + self.layer(x) if uses else x + 0


class Sometimes(Plain):
    """Which is one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = Extra()

    def forward(self, x: Tensor, uses: int = 1) -> Tensor:
        return super().forward(self.extra(x, uses))


def square(output: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
    return (output - batch["y"]).square().sum(), output.numel()


def batches_of(num_steps: int, **more: Sequence[Any]) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "x": torch.randn(ROWS, WIDTH, generator=generator),
            "y": torch.randn(ROWS, 3, generator=generator),
            **{name: each[step] for name, each in more.items()},
        }
        for step in range(num_steps)
    ]


def _plain(num_steps: int) -> Problem:
    torch.manual_seed(0)
    return Problem(module=Plain(), batches=batches_of(num_steps), loss=square)


def _sometimes(num_steps: int) -> Problem:
    torch.manual_seed(0)
    batches = batches_of(num_steps, uses=[1, 1, 0, 0, 1, 0, 1, 0, 1, 0][:num_steps])
    return Problem(module=Sometimes(), batches=batches, loss=square)


def _normed(num_steps: int) -> Problem:
    torch.manual_seed(0)
    return Problem(module=Plain(lambda: nn.BatchNorm1d(WIDTH)), batches=batches_of(num_steps), loss=square)


def _matrices(num_steps: int) -> Problem:
    torch.manual_seed(0)
    shares = [
        Share(make=lambda parameters: Muon(parameters, lr=0.01), takes=lambda _, each: each.dim() == 2),
        Share(make=lambda parameters: AdamW(parameters, lr=1e-3, eps=1e-4)),
    ]
    return Problem(module=Plain(), batches=batches_of(num_steps), loss=square, optimizer=shares)


PROBLEMS: dict[str, Callable[[int], Problem]] = {
    "plain layers": _plain,
    "a layer that is used sometimes": _sometimes,
    "batch norm": _normed,
    "Muon and AdamW": _matrices,
}
