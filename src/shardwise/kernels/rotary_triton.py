"""The kernel of `rotary.py`: a program has a few tokens, with all heads of their queries and keys."""

# mypy: ignore-errors
# ruff: noqa: N803, ARG001

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

#: Pairs of queries per iteration of a program (a token with 32 heads of 128 has this many), its most tokens, and its
#: warps. `benchmarks/kernels.py --sweep` tries others.
PAIRS, TOKENS, WARPS = 2048, 4, 4


@triton.jit
def _turn(
    x, y, batch, token, is_token, cosine, sine, x_batch, x_head, x_token, y_batch, y_head, y_token, half, num_heads,
    sign, FROM: tl.constexpr, TO: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    pair = tl.arange(0, HALF)[None, None, :]
    for begin in range(0, num_heads, HEADS):
        head = (begin + tl.arange(0, HEADS))[None, :, None]
        mask = is_token[:, None, None] & (head < num_heads) & (pair < half)
        here = x + (batch * x_batch + token * x_token)[:, None, None] + head.to(tl.int64) * x_head
        # Adjacent pairs are at 2i and 2i + 1, pairs half a head apart at i and half + i.
        step = 2 if FROM else 1
        apart = 1 if FROM else half
        first = tl.load(here + pair * step, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(here + pair * step + apart, mask=mask, other=0.0).to(tl.float32)
        there = y + (batch * y_batch + token * y_token)[:, None, None] + head.to(tl.int64) * y_head
        step = 2 if TO else 1
        apart = 1 if TO else half
        c, s = cosine[:, None, :], sine[:, None, :] * sign
        tl.store(there + pair * step, (first * c - second * s).to(y.dtype.element_ty), mask=mask)
        tl.store(there + pair * step + apart, (second * c + first * s).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _rotate(
    query, key, cosine, sine, positions, query_out, key_out, all_tokens, num_tokens, half, query_heads, key_heads, sign,
    q_batch, q_head, q_token, k_batch, k_head, k_token, qo_batch, qo_head, qo_token, ko_batch, ko_head, ko_token,
    c_batch, c_token, s_batch, s_token, p_batch, p_token,
    HAS_POSITIONS: tl.constexpr, FROM: tl.constexpr, TO: tl.constexpr,
    TOKENS: tl.constexpr, QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = index < all_tokens
    batch = (index // num_tokens).to(tl.int64)
    token = (index % num_tokens).to(tl.int64)
    position = token
    if HAS_POSITIONS:
        position = tl.load(positions + batch * p_batch + token * p_token, mask=is_token, other=0).to(tl.int64)
    pair = tl.arange(0, HALF)[None, :]
    mask = is_token[:, None] & (pair < half)
    c = tl.load(cosine + (batch * c_batch + position * c_token)[:, None] + pair, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sine + (batch * s_batch + position * s_token)[:, None] + pair, mask=mask, other=0.0).to(tl.float32)
    _turn(
        query, query_out, batch, token, is_token, c, s, q_batch, q_head, q_token, qo_batch, qo_head, qo_token,
        half, query_heads, sign, FROM, TO, QUERY_HEADS, HALF,
    )  # fmt: skip
    _turn(
        key, key_out, batch, token, is_token, c, s, k_batch, k_head, k_token, ko_batch, ko_head, ko_token,
        half, key_heads, sign, FROM, TO, KEY_HEADS, HALF,
    )  # fmt: skip


def rotate_into(
    query, key, cosine, sine, positions, query_out, key_out, sign: float, from_beside: bool, to_beside: bool
) -> None:
    """Write the rotated heads. Only the last dim of inputs and outputs must be contiguous."""
    batch, query_heads, num_tokens, dim = query.shape
    half = dim // 2
    if not query.numel() and not key.numel():
        return
    cosine, sine = (each if each.stride(-1) == 1 else each.contiguous() for each in (cosine, sine))

    def steps(table: Tensor) -> tuple[int, int]:
        if table.dim() == 2:
            return 0, table.stride(0)
        return (0 if table.shape[0] == 1 else table.stride(0)), (0 if table.shape[1] == 1 else table.stride(1))

    def tile(num_heads: int) -> int:
        return min(triton.next_power_of_2(num_heads), max(1, PAIRS // triton.next_power_of_2(half)))

    all_tokens = batch * num_tokens
    tokens = max(1, min(TOKENS, PAIRS // (tile(query_heads) * triton.next_power_of_2(half))))
    _rotate[(triton.cdiv(all_tokens, tokens),)](
        query, key, cosine, sine, positions, query_out, key_out, all_tokens, num_tokens, half, query_heads,
        key.shape[1], sign,
        *(stride for each in (query, key, query_out, key_out) for stride in each.stride()[:3]),
        *steps(cosine), *steps(sine),
        *((0, 0) if positions is None else steps(positions[..., None])),
        HAS_POSITIONS=positions is not None, FROM=from_beside, TO=to_beside,
        TOKENS=tokens, QUERY_HEADS=tile(query_heads), KEY_HEADS=tile(key.shape[1]), HALF=triton.next_power_of_2(half),
        num_warps=WARPS,
    )  # fmt: skip


@custom_op("shardwise::rotate", mutates_args=())
def rotate(
    query: Tensor,
    key: Tensor,
    cosine: Tensor,
    sine: Tensor,
    positions: Tensor | None,
    sign: float,
    from_beside: bool,
    to_beside: bool,
) -> tuple[Tensor, Tensor]:
    query, key = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key))
    # Outputs keep the memory order of the inputs: adjacent heads of a token stay adjacent.
    made = torch.empty_like(query), torch.empty_like(key)
    rotate_into(query, key, cosine, sine, positions, *made, sign, from_beside, to_beside)
    return made


@rotate.register_fake
def _(query, key, cosine, sine, positions, sign, from_beside, to_beside):
    query, key = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key))
    return torch.empty_like(query), torch.empty_like(key)
