"""Ring attention (Liu et al. 2023): queries stay, keys and values go round the ring, and partial results are merged.

    forward      rank 0      rank 1      rank 2         backward, on the same way round:
    stop 0       K0 V0       K1 V1       K2 V2          K and V once more, and beside them from the second stop on
    stop 1       K2 V2       K0 V0       K1 V1          the gradients of K and V, which grow at every stop
    stop 2       K1 V1       K2 V2       K0 V0          and at last are brought home

The next keys and values are sent before a stop is computed, so that communication overlaps with it. Partial results are
merged by an online softmax in a fixed order: a rerun gives the same bits if the kernels do.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.ranks.collectives import Group, goes_over_host, wait_for
from shardwise.sharding.context.kernels import AttentionBlock, LogitScaling, bias_of, kernel_for, least_of, wide_type
from shardwise.sharding.context.mask import BlockType, Mask, Tokens
from shardwise.sharding.context.tiles import RingStep, Tile, ring_steps, tiles_of
from shardwise.sharding.dropout import WeightDrop
from shardwise.sharding.zigzag import pieces_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionCall:
    """The parameters of one attention: the ranks that take part, the tokens, and the mask.

    Queries, keys and values are each [batch, heads, this rank's tokens, head size]. Several query heads may share one
    key head. All ranks of the group must compute their attentions in the same order.
    """

    group: Group
    tokens: Tokens
    mask: Mask
    logits: LogitScaling
    #: The dropout of weights, for this rank's heads.
    drop: WeightDrop | None = None


class _Round(NamedTuple):
    """A call, this rank's pieces in order, and the stops of the keys on their way round, with this rank's tiles."""

    call: AttentionCall
    group: Group
    pieces: tuple[int, ...]
    stops: tuple[RingStep, ...]

    def came_from(self, distance: int) -> tuple[int, ...]:
        """Return the pieces of the keys that have come from `distance` ranks before this one."""
        if self.group.size == 1:
            return self.pieces
        return pieces_of((self.group.rank - distance) % self.group.size, self.group.size)


def ring_attention(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """Compute attention of this rank's queries to the keys of all ranks."""
    group = call.group
    stops = ring_steps(call.tokens.block_mask(call.mask), group.rank, group.size)
    return _apply(query, key, value, _Round(call, group, pieces_of(group.rank, group.size), stops))


def whole_attention(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """Compute the same where this rank has all tokens in order: nothing is sent, and no full dense mask is made."""
    pieces = tuple(range(2 * call.tokens.num_ranks))
    stops = (RingStep(0, tiles_of(call.tokens.block_mask(call.mask), pieces, pieces)),)
    return _apply(query, key, value, _Round(call, Group(), pieces, stops))


def _apply(query: Tensor, key: Tensor, value: Tensor, around: _Round) -> Tensor:
    # Keys and values are sent as one tensor, and autograd saves that one.
    packed = torch.cat((key.flatten(), value.flatten()))
    # Kernels choose their own dtypes. Autocast must not round the log-sum-exp.
    with torch.autocast(query.device.type, enabled=False):
        return _Ring.apply(query, packed, (key.shape, value.shape), around)  # type: ignore[no-untyped-call, no-any-return]


Shapes = tuple[torch.Size, torch.Size]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, packed: Tensor, shapes: Shapes, around: _Round) -> Tensor:
        joined = OnlineSoftmax(query, shapes[1][-1])
        for stop, came in _blocks(packed, around):
            for tile in stop.tiles:
                queries, _, block = _block(tile, stop, query, _unpacked(came, shapes), around)
                joined.add(queries, *kernel_for(block).forward(block))
        out, sums = joined.finish(hides=around.call.tokens.may_see_nothing(around.call.mask))
        ctx.save_for_backward(query, packed, out, sums)
        ctx.shapes, ctx.around = shapes, around
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the queries, and of the packed keys and values.

        The log-sum-exp is over all keys, so every tile's weights are final and the tiles' gradients simply add up. The
        gradients of keys and values follow them one stop behind, and are home after a whole round.
        """
        query, packed, out, sums = ctx.saved_tensors
        given, around, grad_query = given.contiguous(), ctx.around, torch.zeros_like(query, dtype=sums.dtype)
        home: Tensor | None = None
        travelling: _Hop | None = None
        for number, (stop, came) in enumerate(_blocks(packed, around)):
            grad_packed = torch.zeros_like(came, dtype=sums.dtype)
            grad_key, grad_value = _unpacked(grad_packed, ctx.shapes)
            for tile in stop.tiles:
                queries, keys, block = _block(tile, stop, query, _unpacked(came, ctx.shapes), around)
                made = kernel_for(block).backward(block, given[:, :, queries], out[:, :, queries], sums[:, :, queries])
                grad_query[:, :, queries] += made[0]
                grad_key[:, :, keys] += made[1]
                grad_value[:, :, keys] += made[2]
            if number == 0:
                # The gradient from this rank's own queries stays here.
                home = grad_packed
                continue
            if travelling is not None:
                grad_packed += travelling.finish()
            is_last = number == len(around.stops) - 1
            following = around.group.size if is_last else around.stops[number + 1].distance
            travelling = _Hop(grad_packed, following - stop.distance, around.group)
        assert home is not None, "every round begins at home"
        if travelling is not None:
            home += travelling.finish()
        return grad_query.to(query.dtype), home.to(packed.dtype), None, None


def _blocks(packed: Tensor, around: _Round) -> Iterator[tuple[RingStep, Tensor]]:
    """Yield keys and values at each stop. The transfer for the next stop starts before each yield."""
    block, stops = packed, around.stops
    for stop, following in zip(stops, [*stops[1:], None], strict=True):
        hop = None if following is None else _Hop(block, following.distance - stop.distance, around.group)
        yield stop, block
        if hop is not None:
            block = hop.finish()


class OnlineSoftmax:
    """The merged result over the keys that queries have seen so far (Milakov and Gimelshein 2018).

    A result over a set of keys is an output o and the logarithm l of the sum of its weights. Two of them merge to

        l = log(exp(l1) + exp(l2))          o = o1 exp(l1 - l) + o2 exp(l2 - l)

    which is the softmax over both sets. It is exact in any order, up to rounding; the order here is fixed.
    """

    def __init__(self, query: Tensor, value_dim: int) -> None:
        self._query, self._value_dim = query, value_dim
        # A single result for all queries is kept unconverted until a second comes.
        self._only: tuple[Tensor, Tensor] | None = None
        self._all: tuple[Tensor, Tensor] | None = None

    def add(self, queries: slice, out: Tensor, sums: Tensor) -> None:
        """Merge the result of some of the queries."""
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
        """Return the result. `hides`: some queries may be fully masked. Their output is 0, with no gradient."""
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


class _Hop:
    """A send to the rank `distance` further on, and a receive from the rank as far back, both in flight."""

    def __init__(self, sent: Tensor, distance: int, group: Group) -> None:
        self._device, self._group = sent.device, group
        group.traffic.note("send", sent.numel() * sent.element_size())
        if goes_over_host(sent.device, group):
            sent = sent.cpu()
        self._sent, self._arrived = sent, torch.empty_like(sent)
        target, source = (group.rank + distance) % group.size, (group.rank - distance) % group.size
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=group.handle, group_peer=target),
                dist.P2POp(dist.irecv, self._arrived, group=group.handle, group_peer=source),
            ]
        )

    def finish(self) -> Tensor:
        for work in self._works:
            wait_for(work, self._group, "send")
        return self._arrived.to(self._device)


def _block(
    tile: Tile, stop: RingStep, query: Tensor, came: tuple[Tensor, Tensor], around: _Round
) -> tuple[slice, slice, AttentionBlock]:
    """Return a tile's slices of this rank's queries and of the keys at this stop, and its attention block."""
    call, length = around.call, around.call.tokens.piece_length
    queries, keys = (slice(run.start * length, run.stop * length) for run in (tile.queries, tile.keys))
    bias = factors = None
    if tile.kind is BlockType.PARTIAL or call.drop is not None:
        places = _places([around.pieces[place] for place in tile.queries], length, query.device)
        others = _places([around.came_from(stop.distance)[place] for place in tile.keys], length, query.device)
        if tile.kind is BlockType.PARTIAL:
            bias = bias_of(call.tokens.dense_mask(call.mask, places, others), query.dtype)
        if call.drop is not None:
            factors = call.drop.factors(places, others)
    block = AttentionBlock(
        query=query[:, :, queries],
        key=came[0][:, :, keys],
        value=came[1][:, :, keys],
        bias=bias,
        causal=tile.kind is BlockType.CAUSAL,
        logits=call.logits,
        factors=factors,
    )
    return queries, keys, block


def _places(pieces: Sequence[int], length: int, device: torch.device) -> Tensor:
    """Return the positions in the whole sequence of the tokens of some pieces."""
    return torch.cat([torch.arange(piece * length, (piece + 1) * length, device=device) for piece in pieces])


def _unpacked(packed: Tensor, shapes: Shapes) -> tuple[Tensor, Tensor]:
    key, value = torch.split(packed, [shape.numel() for shape in shapes])
    return key.view(shapes[0]), value.view(shapes[1])
