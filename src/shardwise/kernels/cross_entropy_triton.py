"""The kernels of `cross_entropy.py`, which `linear_cross_entropy.py` also uses for chunks of logits."""

# mypy: ignore-errors
# ruff: noqa: N803, ARG001

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from shardwise.kernels.device_functions import tanh
from shardwise.kernels.loss_terms import Terms

#: Words per iteration of a program, and its warps. `benchmarks/kernels.py --sweep` tries others.
BLOCK, WARPS = 4096, 4


@triton.jit
def _cap(z, softcap, HAS_CAP: tl.constexpr):
    if HAS_CAP:
        z = softcap * tanh(z / softcap)
    return z


@triton.jit
def _stats(
    logits, labels, weight, out, stride, tokens, first, here, words, ignored, softcap,
    HAS_CAP: tl.constexpr, HAS_WEIGHT: tl.constexpr, IS_SMOOTHED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + token).to(tl.int64)
    if label == ignored:
        # Values that cause no NaN later.
        tl.store(out + token, 0.0)
        tl.store(out + tokens + token, 1.0)
        tl.store(out + 2 * tokens + token, 0.0)
        tl.store(out + 3 * tokens + token, 0.0)
    else:
        top = -float("inf")
        total = 0.0
        weighted = 0.0
        for begin in range(0, here, BLOCK):
            word = begin + tl.arange(0, BLOCK)
            mask = word < here
            z = tl.load(logits + token * stride + word, mask=mask, other=-float("inf")).to(tl.float32)
            z = _cap(z, softcap, HAS_CAP)
            z = tl.where(mask, z, -float("inf"))
            new = tl.maximum(top, tl.max(z, 0))
            # If everything so far is -inf, there is no maximum to shift by.
            shift = tl.where(new == -float("inf"), 0.0, new)
            total = total * tl.exp(top - shift) + tl.sum(tl.exp(z - shift), 0)
            top = new
            if IS_SMOOTHED:
                if HAS_WEIGHT:
                    z *= tl.load(weight + first + word, mask=mask, other=0.0)
                weighted += tl.sum(tl.where(mask, z, 0.0), 0)
        column = label - first
        is_here = (column >= 0) & (column < here)
        hit = tl.load(logits + token * stride + column, mask=is_here, other=0.0).to(tl.float32)
        hit = _cap(hit, softcap, HAS_CAP)
        hit = tl.where((label < 0) | (label >= words), float("nan"), tl.where(is_here, hit, 0.0))
        tl.store(out + token, top)
        tl.store(out + tokens + token, total)
        tl.store(out + 2 * tokens + token, hit)
        tl.store(out + 3 * tokens + token, weighted)


@triton.jit
def _gradient(
    logits, labels, stats, scale, weight, weight_sum, out, stride, out_stride, tokens, first, here, words, width,
    ignored, softcap, smoothing, z_loss,
    HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    word = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(labels + token).to(tl.int64)
    target = out + token * out_stride + word
    if label == ignored:
        tl.store(target, tl.zeros((BLOCK,), out.dtype.element_ty), mask=word < width)
    else:
        mask = word < here
        z = tl.load(logits + token * stride + word, mask=mask, other=0.0).to(tl.float32)
        z = _cap(z, softcap, HAS_CAP)
        top = tl.load(stats + token)
        total = tl.load(stats + tokens + token)
        share = smoothing / words
        of_label = 1.0 - smoothing
        factor = of_label + smoothing
        if HAS_WEIGHT:
            of_label *= tl.load(weight + tl.minimum(tl.maximum(label, 0), words - 1))
            factor = of_label + share * tl.load(weight_sum)
        factor += 2.0 * z_loss * (top + tl.log(total))
        found = tl.exp(z - top) * (factor / total)
        if HAS_WEIGHT:
            found -= share * tl.load(weight + first + word, mask=mask, other=0.0)
        else:
            found -= share
        found -= tl.where(first + word == label, of_label, 0.0)
        if HAS_CAP:
            found *= 1.0 - (z / softcap) * (z / softcap)
        if HAS_SCALE:
            found *= tl.load(scale + token).to(tl.float32)
        tl.store(target, tl.where(mask, found, 0.0).to(out.dtype.element_ty), mask=word < width)


def stats_into(logits, labels, weight, out, terms, first: int = 0, here: int | None = None, words: int | None = None):
    """Write four numbers per token to `out`, [4, tokens], over this rank's words: `here` of them from `first` on.

    They are the maximum logit, the sum of exponentials relative to it, the label's logit (0 if it is on another rank),
    and the weighted sum of the logits, for label smoothing.
    """
    tokens, width = logits.shape
    here, words = width if here is None else here, width if words is None else words
    if tokens:
        _stats[(tokens,)](
            logits, labels, weight, out, logits.stride(0), out.stride(0), first, here, words,
            terms.ignore_index, terms.softcap,
            HAS_CAP=bool(terms.softcap), HAS_WEIGHT=weight is not None, IS_SMOOTHED=bool(terms.label_smoothing),
            BLOCK=min(BLOCK, triton.next_power_of_2(max(here, 16))), num_warps=WARPS,
        )  # fmt: skip


def gradient_into(
    logits, labels, stats, scale, weight, weight_sum, out, terms, first: int = 0, here=None, words=None
) -> None:
    """Write the gradient of the logits to `out`, which may be the logits. `scale` multiplies each token's gradient."""
    tokens, width = logits.shape
    here, words = width if here is None else here, width if words is None else words
    block = min(BLOCK, triton.next_power_of_2(max(width, 16)))
    if logits.numel():
        _gradient[(tokens * triton.cdiv(width, block),)](
            logits, labels, stats, scale, weight, weight_sum, out, logits.stride(0), out.stride(0), stats.stride(0),
            first, here, words, width, terms.ignore_index, terms.softcap, terms.label_smoothing, terms.z_loss,
            HAS_SCALE=scale is not None, HAS_CAP=bool(terms.softcap), HAS_WEIGHT=weight is not None,
            BLOCK=block, num_warps=WARPS,
        )  # fmt: skip


def _rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(-1) == 1 else logits.contiguous()


@custom_op("shardwise::softmax_stats", mutates_args=())
def softmax_stats(
    logits: Tensor, labels: Tensor, weight: Tensor | None, ignore_index: int, softcap: float, is_smoothed: bool
) -> Tensor:
    out = torch.empty((4, logits.shape[0]), dtype=torch.float32, device=logits.device)
    terms = Terms(ignore_index=ignore_index, softcap=softcap, label_smoothing=float(is_smoothed))
    stats_into(_rows(logits), labels.contiguous(), weight, out, terms)
    return out


@softmax_stats.register_fake
def _(logits, labels, weight, ignore_index, softcap, is_smoothed):
    return logits.new_empty((4, logits.shape[0]), dtype=torch.float32)


@custom_op("shardwise::softmax_gradient", mutates_args=())
def softmax_gradient(
    logits: Tensor,
    labels: Tensor,
    stats: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    weight_sum: Tensor | None,
    ignore_index: int,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    terms = Terms(ignore_index=ignore_index, softcap=softcap, label_smoothing=label_smoothing, z_loss=z_loss)
    gradient_into(_rows(logits), labels.contiguous(), stats, scale, weight, weight_sum, out, terms)
    return out


@softmax_gradient.register_fake
def _(logits, labels, stats, scale, weight, weight_sum, ignore_index, softcap, label_smoothing, z_loss):
    return logits.new_empty(logits.shape)
