"""A module of a user's that sums over ranks by itself, and does not wait for the sum."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

#: Sums that nobody waits for.
_WORKS: list[Any] = []


class Hasty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        mean = hidden.detach().mean(0)
        if dist.is_initialized() and torch.is_grad_enabled():
            _WORKS.append(dist.all_reduce(mean, async_op=True))
        # Read, and nothing comes of it: else trials would see at times that ranks compute what one does not.
        made: Tensor = self.second(hidden - 0.0 * mean)
        return made


def factory() -> tuple[nn.Module, dict[str, Tensor], Any]:
    batch = {"x": torch.randn(4, 8), "y": torch.randn(4, 2)}
    return Hasty(), batch, lambda output, batch: ((output - batch["y"]).square().mean(), 1)
