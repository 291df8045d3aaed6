"""The kernel of `cache_write.py`: each program handles a few heads of one token."""

# mypy: ignore-errors
# ruff: noqa: N803, N806

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.launch import launch, overlapping

#: The most heads per program, all of one kind: queries, keys or values.
MOST_HEADS = 8


@triton.jit
def _normed_and_turned(
    first, second, norm, cosine, sine, position, pair, is_pair, epsilon,
    HALF_DIM: tl.constexpr, HAS_NORM: tl.constexpr, HAS_ANGLES: tl.constexpr,
    STEP: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Return both elements of each pair, [heads, pairs], rounded where the definition rounds."""
    one, other = first.to(tl.float32), second.to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(one * one, 1) + tl.sum(other * other, 1)
        rstd = 1.0 / tl.sqrt(squares / (2 * HALF_DIM) + epsilon)
        w_one = tl.load(norm + pair * STEP, mask=is_pair, other=0.0).to(tl.float32)
        w_other = tl.load(norm + pair * STEP + APART, mask=is_pair, other=0.0).to(tl.float32)
        one = (one * rstd[:, None] * w_one[None, :]).to(first.dtype).to(tl.float32)
        other = (other * rstd[:, None] * w_other[None, :]).to(first.dtype).to(tl.float32)
    if HAS_ANGLES:
        c = tl.load(cosine + position * HALF_DIM + pair, mask=is_pair, other=0.0)[None, :]
        s = tl.load(sine + position * HALF_DIM + pair, mask=is_pair, other=0.0)[None, :]
        turned = one * c - other * s
        other = other * c + one * s
        one = turned
    return one.to(first.dtype), other.to(first.dtype)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _write(
    given, query, keys, values, positions, slots, q_norm, k_norm, cosine, sine, epsilon,
    given_stride, block_stride, head_stride, token_stride, num_heads, num_kv_heads,
    BLOCK_SIZE: tl.constexpr, HALF_DIM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_ANGLES: tl.constexpr, INTERLEAVED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * HEADS
    head = begin + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    is_pair = pair < HALF_DIM
    mask = (head < num_heads + 2 * num_kv_heads)[:, None] & is_pair[None, :]
    STEP: tl.constexpr = 2 if INTERLEAVED and HAS_ANGLES else 1
    APART: tl.constexpr = 1 if INTERLEAVED and HAS_ANGLES else HALF_DIM
    here = given + token * given_stride + head[:, None] * (2 * HALF_DIM) + pair[None, :] * STEP
    if begin < num_heads:
        first = tl.load(here, mask=mask, other=0.0)
        second = tl.load(here + APART, mask=mask, other=0.0)
        position = tl.load(positions + token).to(tl.int64)
        first, second = _normed_and_turned(
            first, second, q_norm, cosine, sine, position, pair, is_pair, epsilon,
            HALF_DIM, HAS_NORM, HAS_ANGLES, STEP, APART,
        )  # fmt: skip
        there = query + (token * num_heads + head)[:, None] * (2 * HALF_DIM) + pair[None, :]
        tl.store(there, first, mask=mask)
        tl.store(there + HALF_DIM, second, mask=mask)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride
            if begin < num_heads + num_kv_heads:
                first = tl.load(here, mask=mask, other=0.0)
                second = tl.load(here + APART, mask=mask, other=0.0)
                position = tl.load(positions + token).to(tl.int64)
                first, second = _normed_and_turned(
                    first, second, k_norm, cosine, sine, position, pair, is_pair, epsilon,
                    HALF_DIM, HAS_NORM, HAS_ANGLES, STEP, APART,
                )  # fmt: skip
                there = keys + place + (head - num_heads).to(tl.int64)[:, None] * head_stride + pair[None, :]
                tl.store(there, first, mask=mask)
                tl.store(there + HALF_DIM, second, mask=mask)
            else:
                here = given + token * given_stride + head[:, None] * (2 * HALF_DIM) + pair[None, :]
                first = tl.load(here, mask=mask, other=0.0)
                second = tl.load(here + HALF_DIM, mask=mask, other=0.0)
                kv_head = (head - num_heads - num_kv_heads).to(tl.int64)
                there = values + place + kv_head[:, None] * head_stride + pair[None, :]
                tl.store(there, first, mask=mask)
                tl.store(there + HALF_DIM, second, mask=mask)


def write(given: Tensor, keys: Tensor, values: Tensor, positions: Tensor, slots: Tensor, turn: Any) -> Tensor:
    """See `write_cache`."""
    num_tokens, width = given.shape
    num_kv_heads, size, dim = keys.shape[1:]
    num_heads = width // dim - 2 * num_kv_heads
    query = torch.empty((num_tokens, num_heads, dim), dtype=given.dtype, device=given.device)
    if not num_tokens:
        return query
    # A program has heads of one kind, so their number divides both head counts.
    together = num_heads | num_kv_heads
    heads = min(MOST_HEADS, together & -together)
    launch(
        _write, (num_tokens, (num_heads + 2 * num_kv_heads) // heads),
        given, query, keys, values, positions, slots, turn.q_norm, turn.k_norm, turn.cosine, turn.sine, turn.epsilon,
        given.stride(0), *keys.stride()[:3], num_heads, num_kv_heads,
        BLOCK_SIZE=size, HALF_DIM=dim // 2, HALF=triton.next_power_of_2(dim // 2), HEADS=heads,
        HAS_NORM=turn.q_norm is not None, HAS_ANGLES=turn.cosine is not None, INTERLEAVED=turn.interleaved,
        num_warps=1 if heads < 4 else 2, **overlapping(given.device),
    )  # fmt: skip
    return query
