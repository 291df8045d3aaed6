"""What is computed where: no rank more than another, nothing that is not seen, and no hop that nobody needs."""

import pytest
import torch

from shardwise.sharding.context.mask import BlockType, Mask, Tokens
from shardwise.sharding.context.tiles import RingStep, ring_steps, tiles_of
from shardwise.sharding.zigzag import pieces_of

LENGTH = 8  # Of a piece.


def tokens_of(num_ranks: int) -> Tokens:
    return Tokens(num_ranks=num_ranks, length=2 * num_ranks * LENGTH, num_real=2 * num_ranks * LENGTH)


def stops(num_ranks: int, rank: int, mask: Mask) -> tuple[RingStep, ...]:
    return ring_steps(tokens_of(num_ranks).block_mask(mask), rank, num_ranks)


def work(stop: RingStep) -> float:
    """In pieces against pieces; a causal square is half of one, and its diagonal is left out of account."""
    sizes = [(len(tile.queries) * len(tile.keys), tile.kind) for tile in stop.tiles]
    return sum(size / 2 if kind is BlockType.CAUSAL else size for size, kind in sizes)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 16])
def test_causal_attention_is_the_same_work_for_every_rank_at_every_stop(num_ranks: int) -> None:
    for rank in range(num_ranks):
        found = stops(num_ranks, rank, Mask(causal=True))
        assert [stop.distance for stop in found] == list(range(num_ranks))
        assert [work(stop) for stop in found] == [2.0] * num_ranks
        assert [len(stop.tiles) for stop in found] == [1] * num_ranks, "one call of a kernel for each"


def test_the_drawing_of_stops_is_what_four_ranks_meet() -> None:
    for rank, met in enumerate(([(3, 4), (2, 5), (1, 6)], [(0,), (3, 4), (2, 5)])):
        seen = [
            tuple(sorted(pieces_of((rank - stop.distance) % 4, 4)[place] for tile in stop.tiles for place in tile.keys))
            for stop in stops(4, rank, Mask(causal=True))[1:]
        ]
        assert seen == met


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 9, 20, 1000])
def test_tiles_cover_what_is_seen_and_nothing_else_without_a_mask(
    num_ranks: int, causal: bool, window: int | None
) -> None:
    mask, tokens = Mask(causal=causal, window=window), tokens_of(num_ranks)
    every = tuple(range(2 * num_ranks))
    places = torch.arange(tokens.length)
    seen = tokens.dense_mask(mask, places, places)[0, 0]
    covered = torch.zeros_like(seen)
    for tile in tiles_of(tokens.block_mask(mask), every, every):
        rows = slice(tile.queries.start * LENGTH, tile.queries.stop * LENGTH)
        columns = slice(tile.keys.start * LENGTH, tile.keys.stop * LENGTH)
        assert not covered[rows, columns].any(), "no two tiles overlap"
        square = torch.ones_like(seen[rows, columns])
        if tile.kind is BlockType.CAUSAL:
            square = square.tril()
        covered[rows, columns] = seen[rows, columns] if tile.kind is BlockType.PARTIAL else square
    assert torch.equal(covered, seen)


def test_a_window_needs_no_keys_from_far_away_and_they_pass_over_those_ranks() -> None:
    # The pieces beside a rank's two pieces lie on the ranks before and after it.
    for rank in range(8):
        assert [stop.distance for stop in stops(8, rank, Mask(causal=True, window=LENGTH))] == [0, 1, 7]


def test_documents_within_pieces_need_no_other_rank() -> None:
    tokens = tokens_of(3)
    tokens.documents = torch.arange(tokens.length)[None] // LENGTH
    block_mask = tokens.block_mask(Mask(causal=True, documents=True))
    assert str(block_mask).split() == ["\\.....", ".\\....", "..\\...", "...\\..", "....\\.", ".....\\"]
    assert [stop.distance for stop in ring_steps(block_mask, 1, 3)] == [0]


def test_a_document_over_two_pieces_is_masked_only_where_it_ends() -> None:
    tokens = tokens_of(2)
    tokens.documents = (torch.arange(tokens.length)[None] >= 2 * LENGTH + 3).long()
    assert str(tokens.block_mask(Mask(causal=True, documents=True))).split() == ["\\...", "#\\..", "???.", "..?\\"]


def test_padding_that_fills_a_piece_is_not_computed() -> None:
    tokens = tokens_of(2)
    tokens.hidden = torch.arange(tokens.length)[None] < LENGTH + 2
    assert str(tokens.block_mask(Mask(causal=True, padding=True))).split() == ["....", ".?..", ".?\\.", ".?#\\"]
