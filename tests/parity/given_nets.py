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


def own_training() -> Any:
    """With an optimizer whose groups go by identity and by name, a schedule, and another bound of the norm."""
    net = Net()

    def make(parameters: Any) -> torch.optim.Optimizer:
        head = [each for each in parameters if each is net.head.weight]
        names = dict(net.named_parameters())
        rest = [each for name, each in names.items() if name != "head.weight"]
        groups: list[dict[str, Any]] = [{"params": head, "lr": 0.3}, {"params": rest}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    how = {"optimizer": make, "scheduler": lambda each: torch.optim.lr_scheduler.StepLR(each, 2), "clip": 0.2}
    return net, {"x": torch.randn(8, 8), "y": torch.randn(8, 3)}, mean_square, how


def _words() -> dict[str, Tensor]:
    labels = torch.randint(3, (8,))
    labels[:3] = -100
    return {"x": torch.randn(8, 8), "labels": labels}


def mean_of_means() -> Any:
    """Labels that are ignored are not spread evenly over rows, and the loss is their mean."""
    return Net(), _words(), lambda output, batch: nn.functional.cross_entropy(output, batch["labels"])


def sum_and_number() -> Any:
    """The same as it should be."""

    def loss(output: Tensor, batch: Any) -> Any:
        labels = batch["labels"]
        return nn.functional.cross_entropy(output, labels, reduction="sum"), (labels != -100).sum()

    return Net(), _words(), loss


def sum_alone() -> Any:
    """A sum that does not say over how many."""
    return (
        Net(),
        {"x": torch.randn(8, 8), "y": torch.randn(8, 3)},
        lambda output, batch: mean_square(output, batch) * len(output),
    )


class Carried(Net):
    """A number that a block computes from its batch is used by a later one, beside what is handed on."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x + layer(x) * self.scale
            if number == 0:
                self.scale = float(x.detach().abs().mean())
        found: Tensor = self.head(x)
        return found


def carried() -> Any:
    return Carried(), {"x": torch.randn(8, 8), "y": torch.randn(8, 3)}, mean_square


class Noisy(Net):
    """It draws numbers that no plan draws alike."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn_like(x))


def noisy() -> Any:
    return Noisy(), {"x": torch.randn(8, 8), "y": torch.randn(8, 3)}, mean_square
