"""Balancing without a loss (DeepSeek-V3, section 2.1.2): scores of overloaded experts go down, those of others up."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shardwise.nets.router import Router


@torch.no_grad()
def correct_balance(module: nn.Module, speed: float, *, add_up: Callable[[Tensor], None] | None = None) -> None:
    """Move every router's correction by `speed` against its load since the last call. Call it once a step.

    `add_up(load)` sums the load of one router in place over the ranks that share it; alone, none is needed.
    """
    for router in module.modules():
        if isinstance(router, Router) and router.correction is not None:
            if add_up is not None:
                add_up(router.load)
            load = router.load.float()
            router.correction += speed * (load.mean() - load).sign()
            router.load.zero_()
