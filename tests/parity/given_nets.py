"""Modules of a user, for `--module`."""

from typing import Any

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Two blocks, each with a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5)) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        found: Tensor = self.head(x)
        return found


def mean_square(output: Tensor, batch: Any) -> Tensor:
    wanted: Tensor = batch["y"]
    return (output - wanted).square().mean()


def regression() -> tuple[nn.Module, dict[str, Tensor], Any]:
    return Net(), {"x": torch.randn(8, 8), "y": torch.randn(8, 3)}, mean_square


def two_batches() -> tuple[nn.Module, list[dict[str, Tensor]], Any]:
    return Net(), [{"x": torch.randn(8, 8), "y": torch.randn(8, 3)} for _ in range(2)], mean_square


def module_alone() -> nn.Module:
    return Net()


def no_dictionary() -> Any:
    return Net(), [torch.randn(8, 8)], mean_square
