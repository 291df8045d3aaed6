"""Experts of a user's own are tried before they are shared out: is what they make a weighted sum?

Shared out, an expert is given a row for each choice and a weight of one, and what it makes is weighted where the token
came from. That is the same only if experts make, of each token, the sum of what each chosen expert makes of it alone,
times its weight. A copy of two experts, with numbers of its own, makes three tokens both ways.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shardwise.sharding.expert.layers import ExpertLayer
from shardwise.stages.split.module_copy import copied
from shardwise.units import format_percent

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}


def why_no_weighted_sum(layer: ExpertLayer) -> str | None:
    """Why a layer's experts cannot be shared out; None if they can, or if they cannot be tried apart from the module.

    How wide a token is nobody says: it is tried with every width that their parameters have.
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
    """A copy of two of the experts."""
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
    """How far apart the two ways are, in what is made and in every gradient."""
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
