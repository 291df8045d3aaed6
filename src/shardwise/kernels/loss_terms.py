"""The terms of a cross entropy, each token's loss from the kernels' statistics, and the tokens of a chunk."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The options of the loss: see `cross_entropy.py`. A soft cap of 0 is none."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float = 0.0
    z_loss: float = 0.0


def losses_of(
    stats: Tensor, labels: Tensor, weight: Tensor | None, weight_sum: Tensor | None, words: int, terms: Terms
) -> Tensor:
    """Return each token's loss from the kernel's statistics: see `softmax_stats`. `weight_sum` is over all words."""
    top, total, hit, weighted = stats.unbind()
    lse = top + total.log()
    s = terms.label_smoothing
    losses = (1 - s) * (lse - hit)
    if weight is not None:
        losses = losses * weight.float()[labels.clamp(0, words - 1)]
    if s:
        losses = losses + s / words * (lse * (words if weight_sum is None else weight_sum) - weighted)
    if terms.z_loss:
        losses = losses + terms.z_loss * lse.square()
    return losses.masked_fill(labels == terms.ignore_index, 0)


def loss_of(
    stats: Tensor,
    labels: Tensor,
    class_weight: Tensor | None,
    weight_sum: Tensor | None,
    token_weight: Tensor | None,
    words: int,
    terms: Terms,
) -> Tensor:
    """Return the sum over all tokens."""
    losses = losses_of(stats, labels, class_weight, weight_sum, words, terms)
    return (losses if token_weight is None else losses * token_weight.float()).sum()


def chunk_tokens(tokens: int, words: int, itemsize: int, chunk_bytes: int) -> int:
    """Return the tokens of a chunk: as many as fit, chunks being about equal, in multiples of 128 if several."""
    most = max(1, chunk_bytes // max(words * itemsize, 1))
    if tokens <= most:
        return max(tokens, 1)
    even = -(-tokens // -(-tokens // most))
    rounded = -(-even // 128) * 128
    return rounded if rounded <= most else max(most // 128 * 128, min(most, 128))
