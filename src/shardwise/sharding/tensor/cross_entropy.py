"""The cross entropy of logits of which each rank has its own words (vocab-parallel, as in Megatron-LM).

For a token with logits z and target t, over all words of all ranks:

    loss = log(sum exp(z - m)) - (z_t - m)          m = max z; one all-reduce for m, one for the other two
    gradient of z_i = softmax(z)_i - [i = t]        needs no further communication

Label smoothing s takes (1 - s) of the target's term and s of the mean over all words.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from shardwise.ranks.collectives import Group, start_all_reduce


def cross_entropy(
    local: Tensor,
    target: Tensor,
    group: Group,
    words: int,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """The cross entropy of scores of which each rank has its words: (tokens, words of this rank).

    Three numbers of each token cross the ranks: the highest score, the sum of exponentials, and the target's score
    (and with smoothing the sum of scores).
    """
    losses = _CrossEntropy.apply(local, target, group, words, ignore_index, label_smoothing)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses  # type: ignore[no-any-return]
    total: Tensor = losses.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, target: Tensor, group: Group, words: int, ignore_index: int, smoothing: float
    ) -> Tensor:
        size = local.shape[-1]
        first = group.rank * size
        count = max(0, min(size, words - first))
        scores = local.float() if local.dtype in (torch.bfloat16, torch.float16) else local
        own = scores[:, :count]
        highest = own.amax(-1) if count else scores.new_full(scores.shape[:1], -torch.inf)
        highest = start_all_reduce(highest, group, dist.ReduceOp.MAX).finish()
        shifted = own - highest.unsqueeze(-1)
        is_here = (target >= first) & (target < first + count)
        column = (target - first).masked_fill(~is_here, 0).unsqueeze(-1)
        hit = shifted.gather(-1, column).squeeze(-1) if count else shifted.new_zeros(shifted.shape[:1])
        parts = [hit.masked_fill(~is_here, 0)]
        if smoothing:
            parts.append(shifted.sum(-1))
        exponentials = shifted.exp_() if not smoothing else shifted.exp()
        parts.append(exponentials.sum(-1))
        hit, *average, total = start_all_reduce(torch.stack(parts), group).finish().unbind()
        is_ignored = target == ignore_index
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), column, is_here, is_ignored)
        ctx.smoothing, ctx.words, ctx.size, ctx.kind = smoothing, words, size, local.dtype
        losses = total.log() - hit * (1 - smoothing)
        if smoothing:
            losses = losses - smoothing / words * average[0]
        return losses.masked_fill(is_ignored, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        shares, column, is_here, is_ignored = ctx.saved_tensors
        found = shares - ctx.smoothing / ctx.words if ctx.smoothing else shares.clone()
        if shares.shape[-1]:
            found.scatter_add_(-1, column, -(1 - ctx.smoothing) * is_here.to(found.dtype).unsqueeze(-1))
        found *= gradient.masked_fill(is_ignored, 0).unsqueeze(-1)
        return functional.pad(found, (0, ctx.size - shares.shape[-1])).to(ctx.kind), None, None, None, None, None
