"""Rotary positions (Su et al. 2021) for queries and keys in one launch.

Pair i of a head at position p is rotated by the angle p f_i. Pairs are half a head apart, or adjacent:

    halves         a0 a1 a2 a3 | b0 b1 b2 b3          out   a cos - b sin | b cos + a sin
    interleaved    a0 b0 a1 b1 a2 b2 a3 b3            out   the same: pairs come out half a head apart

Queries and keys have the same output layout, so their dot products are unaffected. The backward is the rotation by the
negative angle, back to the input layout; only cosines and sines are saved for it.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from shardwise.errors import ShardwiseError
from shardwise.kernels.choose import takes_kernel


def rotary(
    query: Tensor,
    key: Tensor,
    cosine: Tensor,
    sine: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = False,
    in_place: bool = False,
    kernels: bool = True,
) -> tuple[Tensor, Tensor]:
    """Rotate queries, [batch, heads, tokens, dim], and keys, which may have fewer heads.

    `cosine` and `sine` are [batch or 1, tokens, dim / 2]; with `positions`, [batch, tokens], they are tables of
    [length, dim / 2], indexed by the positions. `in_place` may be used where no gradient is needed.
    """
    if in_place and torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        raise ShardwiseError(
            "rotary(in_place=True) overwrites tensors that require a gradient", remedy="in_place=False"
        )
    if in_place and interleaved:
        raise ShardwiseError(
            "adjacent pairs are written half a head apart, which cannot be done in place",
            remedy="in_place=False",
        )
    if kernels and takes_kernel("rotary", query, key, cosine, sine, positions, lacks=lambda: _lacks(query, cosine)):
        if in_place:
            from shardwise.kernels.rotary_triton import rotate_into

            rotate_into(query, key, cosine, sine, positions, query, key, 1.0, False, False)
            return query, key
        made = _Rotary.apply(query, key, cosine, sine, positions, interleaved)  # type: ignore[no-untyped-call]
        return cast("tuple[Tensor, Tensor]", made)
    if positions is not None:
        cosine, sine = cosine[positions], sine[positions]
    made = tuple(rotate_plain(each, cosine, sine, interleaved=interleaved) for each in (query, key))
    return (query.copy_(made[0]), key.copy_(made[1])) if in_place else (made[0], made[1])


def rotate_plain(heads: Tensor, cosine: Tensor, sine: Tensor, *, interleaved: bool) -> Tensor:
    """The definition, for [batch, heads, tokens, dim]."""
    cosine, sine = cosine[:, None], sine[:, None]
    if interleaved:
        first, second = heads[..., 0::2], heads[..., 1::2]
    else:
        first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).type_as(heads)


def _lacks(query: Tensor, cosine: Tensor) -> str | None:
    if query.shape[-1] != 2 * cosine.shape[-1]:
        return f"heads of {query.shape[-1]} numbers of which {2 * cosine.shape[-1]} are rotated"
    return f"heads of {query.shape[-1]} numbers (1,024 it has)" if query.shape[-1] > 1024 else None


class _Rotary(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, positions: Tensor | None, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        from shardwise.kernels.rotary_triton import rotate

        ctx.save_for_backward(cosine, sine, positions)
        ctx.interleaved = interleaved
        return cast("tuple[Tensor, Tensor]", rotate(query, key, cosine, sine, positions, 1.0, interleaved, False))

    @staticmethod
    def backward(ctx: Any, d_query: Tensor, d_key: Tensor) -> tuple[Tensor | None, ...]:
        from shardwise.kernels.rotary_triton import rotate

        cosine, sine, positions = ctx.saved_tensors
        made = rotate(d_query, d_key, cosine, sine, positions, -1.0, False, ctx.interleaved)
        return made[0], made[1], None, None, None, None
