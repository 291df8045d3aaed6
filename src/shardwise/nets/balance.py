"""Load balancing without a loss (DeepSeek-V3, section 2.1.2): lower the scores of overloaded experts, raise others."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shardwise.nets.moe import MoE


@torch.no_grad()
def correct_balance(module: nn.Module, rate: float, load: Mapping[str, Sequence[int]] | None = None) -> None:
    """Move every router's correction by `rate` against the load of its experts. Call it once per step.

    `load` maps names of expert layers to how often each expert was chosen in the batches of all ranks: `expert_load()`
    of an engine. By default it is what the routers have counted since the last call.
    """
    for name, layer in module.named_modules():
        if not isinstance(layer, MoE):
            continue
        router, correction = layer.router, layer.router.correction
        if correction is None or correction.is_meta:
            continue
        if load is None:
            counts = router.load.clone()
            router.load.zero_()
        else:
            counts = torch.tensor(load[f"{name}.experts" if name else "experts"], device=correction.device)
        # Integers: rounding must not decide whether an expert has more than the mean.
        correction += rate * (counts.sum() - counts.numel() * counts).sign()
