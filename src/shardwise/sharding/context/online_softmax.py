"""The online softmax (Milakov and Gimelshein 2018): attention over some keys merged with that over others.

A result over a set of keys is an output o and the logarithm l of the sum of its weights. Two of them merge to

    l = log(exp(l1) + exp(l2))          o = o1 exp(l1 - l) + o2 exp(l2 - l)

which is the softmax over both sets. It is exact in any order, up to rounding; the order here is fixed.
"""

import torch
from torch import Tensor

from shardwise.sharding.context.kernels import least_of, wide_type


class OnlineSoftmax:
    """The merged result of what queries have seen so far: o and l of each query."""

    def __init__(self, query: Tensor, value_dim: int) -> None:
        self._query, self._value_dim = query, value_dim
        # One result for all queries is kept as it is, until another comes.
        self._only: tuple[Tensor, Tensor] | None = None
        self._all: tuple[Tensor, Tensor] | None = None

    def add(self, queries: slice, out: Tensor, sums: Tensor) -> None:
        """Join the result of some of the queries."""
        if self._all is None and self._only is None and out.shape[2] == self._query.shape[2]:
            self._only = out, sums
            return
        if self._all is None:
            self._all = self._nothing()
        if self._only is not None:
            self._join(self._all, slice(None), *self._only)
            self._only = None
        self._join(self._all, queries, out, sums)

    def finish(self, *, hides: bool) -> tuple[Tensor, Tensor]:
        """The result. `hides`: some queries may have seen nothing. They get 0, and give no gradient."""
        out, sums = self._only or self._all or self._nothing()
        if hides:
            blind = sums < least_of(self._query.dtype) / 2
            out, sums = out.masked_fill(blind[..., None], 0), sums.masked_fill(blind, 0)
        return out.to(self._query.dtype), sums

    def _nothing(self) -> tuple[Tensor, Tensor]:
        shape, dtype = self._query.shape[:-1], wide_type(self._query.dtype)
        out = self._query.new_zeros((*shape, self._value_dim), dtype=dtype)
        return out, self._query.new_full(shape, -torch.inf, dtype=dtype)

    @staticmethod
    def _join(whole: tuple[Tensor, Tensor], queries: slice, out: Tensor, sums: Tensor) -> None:
        all_out, all_sums = whole
        # With l = -inf before the first merge, exp(-inf) = 0 leaves nothing of the empty output.
        before = all_sums[:, :, queries]
        after = torch.logaddexp(before, sums)
        kept = all_out[:, :, queries] * (before - after).exp()[..., None]
        all_out[:, :, queries] = kept + out * (sums - after).exp()[..., None]
        all_sums[:, :, queries] = after
