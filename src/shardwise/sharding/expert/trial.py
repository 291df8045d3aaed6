"""Test a user's own experts before they are sharded: is their output a weighted sum?

A sharded expert gets one row for each choice, with a weight of one, and the token's own rank weights the output. That
is correct only if a token's output is the sum, over its chosen experts, of each one's own output times its weight. The
test runs a copy of two experts, with random weights, on three tokens both ways.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shardwise.sharding.expert.layers import ExpertLayer
from shardwise.stages.split.module_copy import copied
from shardwise.units import format_percent

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}


def why_no_weighted_sum(layer: ExpertLayer) -> str | None:
    """Return why a layer's experts cannot be sharded; None if they can, or if they cannot be run outside the module.

    The width of a token is not known, so every dim of their parameters is tried as the width.
    """
    widths = list(dict.fromkeys(size for each in layer.experts.parameters() for size in each.shape[1:]))
    for dtype in _TOLERANCE:
        for width in widths:
            try:
                error = _error(_small(layer, dtype), width, dtype)
            except Exception:
                continue
            if error > _TOLERANCE[dtype]:
                return (
                    "what they make of a token is not the sum of what each expert chosen makes of it, times its weight"
                    f" (off by {format_percent(min(error, 9.99))})"
                )
            return None
    return None


def _small(layer: ExpertLayer, dtype: torch.dtype) -> nn.Module:
    """Return a copy with two experts and random weights."""
    count = min(2, layer.num_experts)
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, nn.Parameter | Tensor] = {}
    for each in layer.experts.parameters():
        numbers = torch.randn((count, *each.shape[1:]), generator=generator, dtype=dtype)
        memo[id(each)] = nn.Parameter(numbers.mul_(each.shape[-1] ** -0.5).to(_home(each)))
    for buffer in layer.experts.buffers():
        memo[id(buffer)] = buffer.detach().clone()
    made = copied(layer.experts, memo)
    setattr(made, "num_experts", count)  # noqa: B010 - a seam of theirs
    return made.train()


def _home(tensor: Tensor) -> torch.device:
    return torch.device("cpu") if tensor.is_meta else tensor.device


def _error(experts: nn.Module, width: int, dtype: torch.dtype) -> float:
    """Return the largest relative difference between the two ways, over the output and every gradient."""
    first = next(experts.parameters())
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn((3, width), generator=generator, dtype=dtype).to(first.device).requires_grad_()
    weights = (0.2 + torch.rand((3, len(first)), generator=generator, dtype=dtype)).to(first.device).requires_grad_()
    chosen = torch.arange(len(first), device=first.device).expand(3, -1).contiguous()
    leaves = [*experts.parameters(), tokens, weights]

    def gradients(call: Callable[[], Tensor]) -> list[Tensor]:
        with torch.enable_grad():
            made = call()
            slope = torch.linspace(-1, 1, made.numel(), dtype=made.dtype, device=made.device).view_as(made)
            found = torch.autograd.grad((made * slope).sum(), leaves, allow_unused=True, materialize_grads=True)
        return [made.detach(), *found]

    def whole() -> Tensor:
        made: Tensor = experts(tokens, chosen, weights).view(3, width)
        return made

    def apart() -> Tensor:
        rows = tokens.repeat_interleave(len(first), 0)
        made = experts(rows, chosen.reshape(-1, 1), rows.new_ones(len(rows), 1))
        summed: Tensor = (made.view(3, len(first), width) * weights[..., None]).sum(1)
        return summed

    pairs = zip(gradients(whole), gradients(apart), strict=True)
    return max(float((one - other).abs().max() / one.abs().max().clamp_min(1e-12)) for one, other in pairs)
