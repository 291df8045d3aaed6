"""The head and its loss, fused: the logits x W^T are never stored as a whole.

    for each chunk of tokens                                      one buffer of logits, reused
        logits   = x_c W^T                                        cuBLAS
        stats    = maximum, sum of exponentials, label's logit    reads the logits
        logits   = d loss / d logits                              reads and writes them in place
        dx_c     = logits W                                       cuBLAS
        dW      += logits^T x_c                                   cuBLAS, accumulated in place

These are the three products that forward and backward need anyway. Nothing is computed twice, because the forward
computes both gradients, for an incoming gradient of 1. The backward multiplies them by the actual one in place, with a
kernel that reads a single number if that is 1. A chunk has as many tokens as fit `chunk_bytes` of logits.

If the vocabulary is sharded over ranks (tensor parallelism), ranks reduce each token's maximum logit, then the sums and
the label's logit: a maximum, and a sum of three numbers per token. `Ranks` has the two as functions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import linear

from shardwise.errors import ShardwiseError
from shardwise.kernels.choose import autocast_type, takes_kernel
from shardwise.kernels.cross_entropy import check_shapes, make_terms, plain_losses, weight_of_all
from shardwise.kernels.loss_terms import Terms

#: Bytes of logits per chunk: 1,024 tokens of 131,072 words in 2 bytes.
CHUNK_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """A sharded vocabulary: this rank has the words from `first` on, of `words` in all. Its weight may be padded.

    `maximum` and `total` return the element-wise maximum and sum of a tensor over the ranks. With `sums_input` the
    gradient of x, of which every rank has a partial sum, is summed too.
    """

    first: int
    words: int
    maximum: Callable[[Tensor], Tensor]
    total: Callable[[Tensor], Tensor]
    sums_input: bool = True


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    ranks: Ranks | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    kernels: bool = True,
) -> Tensor:
    """Return `cross_entropy(x @ weight.T, labels)` in float32, for x [tokens, width] and weight [words, width].

    `token_weight`, [tokens], multiplies each token's loss; it gets no gradient. Under autocast, x and the weight are
    cast as a linear layer casts them.
    """
    if reduction == "none":
        raise ShardwiseError(
            "linear_cross_entropy returns one number: gradients are computed before those of single tokens are known",
            remedy="reduction='sum' with token_weight=..., or cross_entropy(x @ weight.T, labels, reduction='none')",
        )
    terms = make_terms(ignore_index, label_smoothing, softcap, z_loss, reduction)
    check_shapes(x, labels, "x")
    dtype = autocast_type(x.device)
    if dtype is not None:
        x, weight = x.to(dtype), weight.to(dtype)
    is_alike = x.dtype == weight.dtype
    if is_alike and kernels and takes_kernel("linear_cross_entropy", x, weight, labels, class_weight, token_weight):
        total = cast(
            Tensor,
            _LinearCrossEntropy.apply(x, weight, labels, class_weight, token_weight, terms, ranks, chunk_bytes),  # type: ignore[no-untyped-call]
        )
    elif ranks is not None:
        raise ShardwiseError(
            "a vocabulary split over ranks has a kernel, and no definition here",
            remedy="shardwise.sharding.tensor.vocabulary",
        )
    else:
        losses = plain_losses(linear(x, weight), labels, class_weight, terms)
        total = (losses if token_weight is None else losses * token_weight.float()).sum()
    if reduction == "sum":
        return total
    return total / weight_of_all(labels, class_weight, ignore_index)


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        class_weight: Tensor | None,
        token_weight: Tensor | None,
        terms: Terms,
        ranks: Ranks | None,
        chunk_bytes: int,
    ) -> Tensor:
        from shardwise.kernels.linear_cross_entropy_triton import head_loss, head_loss_over

        wants_x, wants_weight = ctx.needs_input_grad[:2]
        if ranks is None:
            total, dx, dw = head_loss(
                x,
                weight,
                labels,
                class_weight,
                token_weight,
                terms.ignore_index,
                terms.label_smoothing,
                terms.softcap,
                terms.z_loss,
                wants_x,
                wants_weight,
                chunk_bytes,
            )
        else:
            total, dx, dw = head_loss_over(
                x, weight, labels, class_weight, token_weight, terms, ranks, wants_x, wants_weight, chunk_bytes
            )
        ctx.save_for_backward(dx, dw)
        if not torch.compiler.is_compiling():
            # The factors applied so far, and the storages: saved-tensor hooks may give the backward a copy.
            ctx.applied = [None, None]
            ctx.homes = [_home(each) for each in (dx, dw)]
        return cast(Tensor, total)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = [
            _scaled(ctx, index, each, gradient) if ctx.needs_input_grad[index] else None
            for index, each in enumerate(ctx.saved_tensors)
        ]
        return *found, None, None, None, None, None, None


def _home(tensor: Tensor) -> StorageWeakRef:
    """Return an identity of a tensor's storage; while it is held, the address is not reused."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _scaled(ctx: Any, index: int, made: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient that the forward computed for an incoming gradient of 1, scaled to this one."""
    if torch.compiler.is_compiling() or ctx.homes[index] != _home(made):
        return (made * gradient).to(made.dtype)
    applied = ctx.applied[index]
    if applied is None:
        # In place, since nothing else uses it. Autograd is not told: a second backward of a retained graph works too.
        from shardwise.kernels.scale_triton import scale_by

        scale_by(made, gradient, torch.ones_like(gradient))
        ctx.applied[index] = gradient.detach().clone()
        return made
    # Do not modify it again: a backward that is split in halves comes here twice.
    return (made * torch.where(gradient == applied, 1.0, gradient / applied)).to(made.dtype)
