"""Ring attention (Liu et al. 2023): queries stay, keys and values go round, and partial results are joined.

    forward      rank 0      rank 1      rank 2         backward, on the same way round:
    stop 0       K0 V0       K1 V1       K2 V2          K and V once more, and beside them from the second stop on
    stop 1       K2 V2       K0 V0       K1 V1          the gradients of K and V, which grow at every stop
    stop 2       K1 V1       K2 V2       K0 V0          and at last are brought home

What is next goes on its way before a stop is computed, so bytes move meanwhile. Joining keeps, for every query, the
logarithm of the sum of its weights so far (Milakov and Gimelshein 2018). All is in a fixed order: a rerun gives the
same bits, if the kernels do.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.ranks.collectives import Group, wait_for
from shardwise.sharding.context.kernels import AttentionBlock, LogitScaling, bias_of, kernel_for
from shardwise.sharding.context.mask import BlockType, Mask, Tokens
from shardwise.sharding.context.online_softmax import OnlineSoftmax
from shardwise.sharding.context.tiles import RingStep, Tile, ring_steps, tiles_of
from shardwise.sharding.dropout import WeightDrop
from shardwise.sharding.zigzag import pieces_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RingPass:
    """What one attention goes by: who takes part, which tokens there are, and what sees what."""

    group: Group
    tokens: Tokens
    mask: Mask
    logits: LogitScaling
    #: The pieces that lie here, in order, and where the keys stop that this rank computes with.
    pieces: tuple[int, ...]
    stops: tuple[RingStep, ...]
    #: What drops weights, of the heads that are here.
    drop: WeightDrop | None = None

    def came_from(self, distance: int) -> tuple[int, ...]:
        """The pieces of keys that have come from so far."""
        if self.group.size == 1:
            return self.pieces
        return pieces_of((self.group.rank - distance) % self.group.size, self.group.size)


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, *, group: Group, tokens: Tokens, mask: Mask, logits: LogitScaling,
    drop: WeightDrop | None = None,
) -> Tensor:  # fmt: skip
    """Attention of this rank's queries to the keys of all ranks: each [batch, heads, this rank's tokens, head size].

    Several heads of queries may share one of keys. All ranks of the group call this in the same order.
    """
    stops = ring_steps(tokens.block_mask(mask), group.rank, group.size)
    pieces = pieces_of(group.rank, group.size)
    around = RingPass(group=group, tokens=tokens, mask=mask, logits=logits, pieces=pieces, stops=stops, drop=drop)
    return _apply(query, key, value, around)


def whole_attention(
    query: Tensor, key: Tensor, value: Tensor, *, tokens: Tokens, mask: Mask, logits: LogitScaling,
    drop: WeightDrop | None = None,
) -> Tensor:  # fmt: skip
    """The same where all tokens lie here, in order: nothing is sent, and no mask of all against all is made."""
    pieces = tuple(range(2 * tokens.num_ranks))
    stops = (RingStep(0, tiles_of(tokens.block_mask(mask), pieces, pieces)),)
    around = RingPass(group=Group(), tokens=tokens, mask=mask, logits=logits, pieces=pieces, stops=stops, drop=drop)
    return _apply(query, key, value, around)


def _apply(query: Tensor, key: Tensor, value: Tensor, around: RingPass) -> Tensor:
    # Keys and values are one tensor on the way, and autograd keeps that one.
    packed = torch.cat((key.flatten(), value.flatten()))
    # Kernels choose their types themselves. Sums of weights are not to be rounded by autocast.
    with torch.autocast(query.device.type, enabled=False):
        return _Ring.apply(query, packed, key.shape, value.shape, around)  # type: ignore[no-untyped-call, no-any-return]


Shapes = tuple[torch.Size, torch.Size]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, packed: Tensor, key_shape: torch.Size, value_shape: torch.Size, around: RingPass
    ) -> Tensor:
        shapes = (key_shape, value_shape)
        out, sums = _forward(query, packed, shapes, around)
        ctx.save_for_backward(query, packed, out, sums)
        ctx.shapes, ctx.around = shapes, around
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        query, packed, out, sums = ctx.saved_tensors
        grad_query, grad_packed = _backward(given.contiguous(), query, packed, out, sums, ctx.shapes, ctx.around)
        return grad_query, grad_packed, None, None, None


def _forward(query: Tensor, packed: Tensor, shapes: Shapes, around: RingPass) -> tuple[Tensor, Tensor]:
    """The output, and the logarithms of the sums of weights."""
    joined = OnlineSoftmax(query, shapes[1][-1])
    for stop, came in _blocks(packed, around):
        for tile in stop.tiles:
            queries, _, block = _block(tile, stop, query, _unpacked(came, shapes), around)
            joined.add(queries, *kernel_for(block).forward(block))
    return joined.finish(hides=around.tokens.may_see_nothing(around.mask))


def _backward(
    given: Tensor, query: Tensor, packed: Tensor, out: Tensor, sums: Tensor, shapes: Shapes, around: RingPass
) -> tuple[Tensor, Tensor]:
    """The gradients of the queries, and of keys and values as they are packed.

    With the sums over all keys every tile's weights are final, so the tiles' gradients simply add up. Those of keys and
    values travel with them one stop behind, and come home after a whole round.
    """
    grad_query = torch.zeros_like(query, dtype=sums.dtype)
    home: Tensor | None = None
    travelling: _Hop | None = None
    for number, (stop, came) in enumerate(_blocks(packed, around)):
        grad_packed = torch.zeros_like(came, dtype=sums.dtype)
        grad_key, grad_value = _unpacked(grad_packed, shapes)
        for tile in stop.tiles:
            queries, keys, block = _block(tile, stop, query, _unpacked(came, shapes), around)
            made = kernel_for(block).backward(block, given[:, :, queries], out[:, :, queries], sums[:, :, queries])
            grad_query[:, :, queries] += made[0]
            grad_key[:, :, keys] += made[1]
            grad_value[:, :, keys] += made[2]
        if number == 0:
            # Of its own keys: they never left, so neither does this part.
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
    return grad_query.to(query.dtype), home.to(packed.dtype)


def _blocks(packed: Tensor, around: RingPass) -> Iterator[tuple[RingStep, Tensor]]:
    """Keys and values at each stop. Before one is given, those of the next are on their way."""
    block, stops = packed, around.stops
    for stop, following in zip(stops, [*stops[1:], None], strict=True):
        hop = None if following is None else _Hop(block, following.distance - stop.distance, around.group)
        yield stop, block
        if hop is not None:
            block = hop.finish()


class _Hop:
    """A tensor on its way to the rank that is so many further, and another on its way here from as far back."""

    def __init__(self, sent: Tensor, distance: int, group: Group) -> None:
        self._sent, self._arrived, self._group = sent, torch.empty_like(sent), group
        group.traffic.note("send", sent.numel() * sent.element_size())
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
        return self._arrived


def _block(
    tile: Tile, stop: RingStep, query: Tensor, came: tuple[Tensor, Tensor], around: RingPass
) -> tuple[slice, slice, AttentionBlock]:
    """Which of the queries here and of the keys that came a tile is of, and the block itself."""
    length = around.tokens.piece_length
    queries, keys = (slice(run.start * length, run.stop * length) for run in (tile.queries, tile.keys))
    bias = factors = None
    if tile.kind is BlockType.PARTIAL or around.drop is not None:
        places = _places([around.pieces[place] for place in tile.queries], length, query.device)
        others = _places([around.came_from(stop.distance)[place] for place in tile.keys], length, query.device)
        if tile.kind is BlockType.PARTIAL:
            bias = bias_of(around.tokens.dense_mask(around.mask, places, others), query.dtype)
        if around.drop is not None:
            factors = around.drop.factors(places, others)
    block = AttentionBlock(
        query=query[:, :, queries],
        key=came[0][:, :, keys],
        value=came[1][:, :, keys],
        bias=bias,
        causal=tile.kind is BlockType.CAUSAL,
        logits=around.logits,
        factors=factors,
    )
    return queries, keys, block


def _places(pieces: Sequence[int], length: int, device: torch.device) -> Tensor:
    """Where the tokens of some pieces stand in the whole sequence."""
    return torch.cat([torch.arange(piece * length, (piece + 1) * length, device=device) for piece in pieces])


def _unpacked(packed: Tensor, shapes: Shapes) -> tuple[Tensor, Tensor]:
    key, value = torch.split(packed, [shape.numel() for shape in shapes])
    return key.view(shapes[0]), value.view(shapes[1])
