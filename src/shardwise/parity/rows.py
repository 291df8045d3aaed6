"""Computations across the rows of a batch, which depend on how batches are divided into microbatches."""

from torch import nn

from shardwise.nets.moe import MoE
from shardwise.torch_private import BatchNormModule

#: The change of router corrections after each step, if there are any.
BIAS_RATE = 0.01


def corrects(module: nn.Module) -> bool:
    """Return whether routers have corrections, which loss-free balancing changes."""
    return any(isinstance(each, MoE) and each.mixture.correction for each in module.modules())


def has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(each, BatchNormModule) for each in module.modules())


def across_rows(module: nn.Module) -> list[str]:
    """Return what is computed across the rows of a microbatch, and so differs for whole batches."""
    found = ["statistics of batch norm"] if has_batch_norm(module) else []
    mixtures = [each.mixture for each in module.modules() if isinstance(each, MoE)]
    if any(each.auxiliary for each in mixtures):
        found.append("the balancing loss of experts")
    if any(each.capacity is not None for each in mixtures):
        found.append("the capacity of experts")
    return found
