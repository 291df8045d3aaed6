"""Cross entropy of logits [tokens, words] with labels, always in float32.

    z = logits, or cap tanh(logits / cap)              soft cap (Gemma 2)
    lse = log sum exp z
    loss = (1 - s) w_t (lse - z_t)                     the label t; its class weight w_t
         + s / words (sum_c w_c (lse - z_c))           label smoothing s
         + z_loss lse^2                                keeps lse near 0 (PaLM, section 5)

    dz_c = p_c ((1 - s) w_t + s / words sum(w) + 2 z_loss lse) - s / words w_c - [c = t] (1 - s) w_t

Forward reads the logits once and keeps three numbers per token: the maximum, the sum of exponentials, and the label's
logit. Only these are exchanged between ranks if the vocabulary is sharded. Backward reads the logits and writes their
gradient. A token with an ignored label has no gradient; a label outside of the vocabulary gives NaN.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from shardwise.errors import ShardwiseError
from shardwise.kernels.choose import takes_kernel
from shardwise.kernels.loss_terms import Terms, losses_of

REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    kernels: bool = True,
) -> Tensor:
    """Return the loss of [tokens, words], like `torch.nn.functional.cross_entropy` of the logits in float32.

    `weight`, [words], is of classes. A mean is over the weights of the labels that are not ignored.
    """
    terms = make_terms(ignore_index, label_smoothing, softcap, z_loss, reduction)
    check_shapes(logits, labels, "logits")
    if kernels and takes_kernel("cross_entropy", logits, labels, weight):
        losses = cast(Tensor, _CrossEntropy.apply(logits, labels, weight, terms))  # type: ignore[no-untyped-call]
    else:
        losses = plain_losses(logits, labels, weight, terms)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / weight_of_all(labels, weight, ignore_index)


def make_terms(
    ignore_index: int, label_smoothing: float, softcap: float | None, z_loss: float, reduction: str
) -> Terms:
    if reduction not in REDUCTIONS:
        raise ShardwiseError(f"unknown reduction {reduction!r}", remedy=" or ".join(REDUCTIONS))
    if not 0.0 <= label_smoothing <= 1.0:
        raise ShardwiseError(f"label_smoothing={label_smoothing} is not between 0 and 1", remedy="label_smoothing=0.1")
    if softcap is not None and softcap <= 0:
        raise ShardwiseError(f"softcap={softcap} is not above 0", remedy="softcap=None for none")
    return Terms(ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=softcap or 0.0, z_loss=z_loss)


def check_shapes(rows: Tensor, labels: Tensor, name: str) -> None:
    if rows.dim() != 2 or labels.shape != rows.shape[:1]:
        raise ShardwiseError(
            f"{name} of shape {tuple(rows.shape)} and labels of shape {tuple(labels.shape)}, where [tokens, ...] and"
            " [tokens] are wanted",
            remedy=f"{name}.flatten(0, -2), labels.flatten()",
        )


def plain_losses(logits: Tensor, labels: Tensor, weight: Tensor | None, terms: Terms) -> Tensor:
    """The definition: return each token's loss."""
    scores = logits.float()
    if terms.softcap:
        scores = terms.softcap * torch.tanh(scores / terms.softcap)
    losses = functional.cross_entropy(
        scores,
        labels,
        None if weight is None else weight.float(),
        ignore_index=terms.ignore_index,
        label_smoothing=terms.label_smoothing,
        reduction="none",
    )
    if terms.z_loss:
        extra = terms.z_loss * scores.logsumexp(-1).square()
        losses = losses + extra.masked_fill(labels == terms.ignore_index, 0)
    return losses


def weight_of_all(labels: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return the denominator of a mean."""
    counts = labels != ignore_index
    return counts.sum() if weight is None else (weight.float()[labels.masked_fill(~counts, 0)] * counts).sum()


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, weight: Tensor | None, terms: Terms) -> Tensor:
        from shardwise.kernels.cross_entropy_triton import softmax_stats

        words = logits.shape[1]
        weight = None if weight is None else weight.float()
        weight_sum = None if weight is None else weight.sum()
        stats = softmax_stats(logits, labels, weight, terms.ignore_index, terms.softcap, bool(terms.label_smoothing))
        ctx.save_for_backward(logits, labels, weight, weight_sum, stats)
        ctx.terms = terms
        return losses_of(stats, labels, weight, weight_sum, words, terms)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from shardwise.kernels.cross_entropy_triton import softmax_gradient

        logits, labels, weight, weight_sum, stats = ctx.saved_tensors
        terms = ctx.terms
        found = softmax_gradient(
            logits,
            labels,
            stats,
            gradient.contiguous(),
            weight,
            weight_sum,
            terms.ignore_index,
            terms.softcap,
            terms.label_smoothing,
            terms.z_loss,
        )
        return found, None, None, None
