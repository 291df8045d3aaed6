"""The chunked loop of `linear_cross_entropy.py`, over the kernels of `cross_entropy_triton.py`."""

# mypy: ignore-errors
# ruff: noqa: ARG001

import torch
from torch import Tensor
from torch.library import custom_op

from shardwise.kernels.cross_entropy_triton import gradient_into, stats_into
from shardwise.kernels.loss_terms import Terms, chunk_tokens, loss_of


def head_loss_over(
    x, weight, labels, class_weight, token_weight, terms, ranks, wants_x: bool, wants_weight: bool, chunk_bytes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the losses, and the gradients of x and of the weight (empty if not wanted)."""
    x, weight, labels = x.contiguous(), weight.contiguous(), labels.contiguous()
    class_weight = None if class_weight is None else class_weight.float().contiguous()
    token_weight = None if token_weight is None else token_weight.float().contiguous()
    weight_sum = None if class_weight is None else class_weight.sum()
    tokens, width = x.shape[0], weight.shape[0]
    first, words = (0, width) if ranks is None else (ranks.first, ranks.words)
    here = max(0, min(width, words - first))
    size = chunk_tokens(tokens, width, x.element_size(), chunk_bytes)
    stats = torch.empty((4, tokens), dtype=torch.float32, device=x.device)
    buffer = torch.empty((min(size, tokens), width), dtype=x.dtype, device=x.device)
    dx = torch.empty_like(x) if wants_x else x.new_empty(0)
    dw = (torch.empty_like if tokens else torch.zeros_like)(weight) if wants_weight else weight.new_empty(0)
    for begin in range(0, tokens, size):
        part = slice(begin, min(begin + size, tokens))
        logits = torch.mm(x[part], weight.t(), out=buffer[: part.stop - begin])
        found = stats[:, part]
        stats_into(logits, labels[part], class_weight, found, terms, first, here, words)
        if ranks is not None:
            _agree(found, ranks)
        if not wants_x and not wants_weight:
            continue
        scale = None if token_weight is None else token_weight[part]
        gradient_into(logits, labels[part], found, scale, class_weight, weight_sum, logits, terms, first, here, words)
        if wants_x:
            torch.mm(logits, weight, out=dx[part])
        if wants_weight and begin:
            dw.addmm_(logits.t(), x[part])
        elif wants_weight:
            torch.mm(logits.t(), x[part], out=dw)
    if ranks is not None and ranks.sums_input and wants_x:
        dx = ranks.total(dx)
    return loss_of(stats, labels, class_weight, weight_sum, token_weight, words, terms), dx, dw


def _agree(stats: Tensor, ranks) -> None:
    """Reduce this rank's stats to those over all words, in place."""
    top = ranks.maximum(stats[0].clone())  # A copy, because it may be overwritten, and this rank's own is still needed.
    shift = torch.where(stats[0] == -torch.inf, -torch.inf, stats[0] - top)
    sums = torch.stack((stats[1] * shift.exp(), stats[2], stats[3]))
    stats[1:] = ranks.total(sums)
    stats[0] = top


@custom_op("shardwise::head_loss", mutates_args=())
def head_loss(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
    wants_x: bool,
    wants_weight: bool,
    chunk_bytes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    terms = Terms(ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=softcap, z_loss=z_loss)
    return head_loss_over(
        x, weight, labels, class_weight, token_weight, terms, None, wants_x, wants_weight, chunk_bytes
    )


@head_loss.register_fake
def _(
    x, weight, labels, class_weight, token_weight, ignore_index, label_smoothing, softcap, z_loss, wants_x,
    wants_weight, chunk_bytes,
):  # fmt: skip
    dx = x.new_empty(x.shape) if wants_x else x.new_empty(0)
    return x.new_empty((), dtype=torch.float32), dx, weight.new_empty(weight.shape if wants_weight else (0,))
