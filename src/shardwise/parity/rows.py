"""What of a module or its training is not of each row by itself, and so depends on how batches are cut."""

from torch import nn

from shardwise.nets.moe import MoE
from shardwise.torch_private import BatchNormModule

#: By how much routers' corrections are moved after each step, where there are some.
BIAS_RATE = 0.01


def corrects(module: nn.Module) -> bool:
    """Whether routers have corrections, which balancing without a loss moves."""
    return any(isinstance(each, MoE) and each.mixture.correction for each in module.modules())


def has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(each, BatchNormModule) for each in module.modules())


def across_rows(module: nn.Module) -> list[str]:
    """What is defined over the rows of a microbatch: then whole batches are something else."""
    found = ["statistics of batch norm"] if has_batch_norm(module) else []
    mixtures = [each.mixture for each in module.modules() if isinstance(each, MoE)]
    if any(each.auxiliary for each in mixtures):
        found.append("the balancing loss of experts")
    if any(each.capacity is not None for each in mixtures):
        found.append("the capacity of experts")
    return found
