"""Attention of one part of a sequence to another in the fewest kernel calls, and the steps of the ring.

A rank's queries stay. Keys and values go round: at distance 1 a rank has those of the rank before it, and so on.

    4 ranks, causal          distance 0        1            2            3
    rank 0 (pieces 0, 7)     its own, causal   keys 3, 4    keys 2, 5    keys 1, 6     by queries 7
    rank 1 (pieces 1, 6)     its own, causal   keys 0       keys 3, 4    keys 2, 5     keys 0 by queries 1, 6
    ...
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from shardwise.sharding.context.mask import BlockMask, BlockType
from shardwise.sharding.zigzag import pieces_of


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries against keys in one kernel call: ranges of pieces, by their index among a rank's pieces."""

    queries: range
    keys: range
    kind: BlockType


@dataclass(frozen=True, slots=True)
class RingStep:
    """The tiles that a rank computes with the keys from `distance` ranks before it."""

    distance: int
    tiles: tuple[Tile, ...]


@lru_cache(maxsize=256)
def ring_steps(block_mask: BlockMask, rank: int, num_ranks: int) -> tuple[RingStep, ...]:
    """Return the stops of keys and values on their way round, the first at home. Distances at which no rank needs them
    are skipped by all ranks: one hop passes over them."""

    def sees(reader: int, owner: int) -> bool:
        return any(
            block_mask.rows[query][key] is not BlockType.EMPTY
            for query in pieces_of(reader, num_ranks)
            for key in pieces_of(owner, num_ranks)
        )

    readers = range(num_ranks)
    wanted = [0, *(far for far in readers[1:] if any(sees(reader, (reader - far) % num_ranks) for reader in readers))]
    own = pieces_of(rank, num_ranks)
    return tuple(
        RingStep(far, tiles_of(block_mask, own, pieces_of((rank - far) % num_ranks, num_ranks))) for far in wanted
    )


def tiles_of(block_mask: BlockMask, queries: Sequence[int], keys: Sequence[int]) -> tuple[Tile, ...]:
    """Return the tiles of some pieces of queries against some pieces of keys."""
    rows = [tuple(block_mask.rows[query][key] for key in keys) for query in queries]
    if len(queries) > 1 and tuple(queries) == tuple(keys) and _is_causal(rows):
        return (Tile(range(len(queries)), range(len(keys)), BlockType.CAUSAL),)
    tiles = []
    for row, places in groupby(range(len(rows)), key=lambda place: _runs(rows[place], place)):
        together = tuple(places)
        tiles += [Tile(range(together[0], together[-1] + 1), run, kind) for run, kind, _ in row]
    return tuple(tiles)


def _is_causal(rows: list[tuple[BlockType, ...]]) -> bool:
    """Whether each piece sees all pieces before it and none after, so that they form one causal sequence."""
    return all(
        kind is (BlockType.CAUSAL if key == query else BlockType.FULL if key < query else BlockType.EMPTY)
        for query, row in enumerate(rows)
        for key, kind in enumerate(row)
    )


def _runs(row: tuple[BlockType, ...], place: int) -> tuple[tuple[range, BlockType, int | None], ...]:
    """Return runs of equal kinds in a row, without empty ones. `place` keeps a causal run from merging with others."""
    runs: list[tuple[range, BlockType, int | None]] = []
    for kind, keys in groupby(range(len(row)), key=lambda key: row[key]):
        together = tuple(keys)
        if kind is BlockType.CAUSAL:
            runs += [(range(key, key + 1), kind, place) for key in together]
        elif kind is not BlockType.EMPTY:
            runs.append((range(together[0], together[-1] + 1), kind, None))
    return tuple(runs)
