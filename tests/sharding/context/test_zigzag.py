"""Which rank has which pieces, and the drawings of it."""

from pathlib import Path

import pytest
import torch

from shardwise.sharding import zigzag as pieces
from shardwise.sharding.context.mask import BlockType, Mask, Tokens
from shardwise.sharding.zigzag import pieces_of, zigzag_shard, zigzag_unshard


def owner_of(piece: int, num_ranks: int) -> int:
    return next(rank for rank in range(num_ranks) if piece in pieces_of(rank, num_ranks))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_every_piece_has_one_owner(num_ranks: int) -> None:
    held = [piece for rank in range(num_ranks) for piece in pieces_of(rank, num_ranks)]
    assert sorted(held) == list(range(2 * num_ranks))


@pytest.mark.parametrize(("num_ranks", "dim"), [(1, 0), (3, 1), (4, -1)])
def test_what_is_taken_apart_is_joined_to_the_same(num_ranks: int, dim: int) -> None:
    whole = torch.arange(24 * 24).view(24, 24)
    parts = [zigzag_shard(whole, dim, rank, num_ranks) for rank in range(num_ranks)]
    assert torch.equal(zigzag_unshard(parts, dim), whole)


def test_the_drawing_is_what_four_ranks_compute() -> None:
    block_mask = Tokens(num_ranks=4, length=64, num_real=64).block_mask(Mask(causal=True))
    drawing = [
        " ".join("." if kind is BlockType.EMPTY else str(owner_of(row, 4)) for kind in kinds)
        for row, kinds in enumerate(block_mask.rows)
    ]
    drawn = (pieces.__doc__ or "").splitlines()
    first = next(number for number, line in enumerate(drawn) if "queries" in line)
    column = drawn[first - 1].index("keys") + len("keys ")
    assert [line[column : column + 15] for line in drawn[first : first + 8]] == drawing
    assert f"rank     {' '.join(str(owner_of(piece, 4)) for piece in range(8))}" in (pieces.__doc__ or "")


def test_the_page_has_the_same_drawing() -> None:
    page = (Path(__file__).parents[3] / "docs" / "context.md").read_text()
    drawn = (pieces.__doc__ or "").splitlines()
    first = next(number for number, line in enumerate(drawn) if "queries" in line)
    width = drawn[first].rindex(".") + 1
    for line in drawn[first - 1 : first + 8]:
        assert line[4:width].rstrip() in page
