"""Attention over keys and values in blocks."""

import pytest
import torch
from torch import Tensor

from shardwise.kernels.paged_attention import make_tiles, paged_attention_plain, paged_decode, paged_prefill, tile_of
from tests.kernels.against import STEP, random_of

every_type = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.whole)]
)


def blocks(lengths: list[int], heads: int, size: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and tables of sequences whose blocks lie in no order, in a cache of two layers."""
    counts = [-(-length // size) for length in lengths]
    cache = torch.randn(sum(counts) + 2, 2, 2, heads, size, dim).to(dtype)
    order = torch.randperm(sum(counts) + 2).tolist()
    tables = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor(order[:count], dtype=torch.int32)
        order = order[count:]
    return cache[:, 1, 0], cache[:, 1, 1], tables


def assert_close(made: Tensor, plain: Tensor, dtype: torch.dtype) -> None:
    assert (made.dtype, made.shape) == (plain.dtype, plain.shape)
    assert (made.double() - plain.double()).abs().max() <= 8 * STEP[dtype] * max(1.0, float(plain.abs().max()))


def in_parts_of_64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of a few hundred tokens are read by several programs, as thousands are on a GPU."""
    triton_file = pytest.importorskip("shardwise.kernels.paged_decode_triton")
    monkeypatch.setattr(triton_file, "count_parts", lambda *_: (6, 64))


@every_type
@pytest.mark.parametrize(
    ("heads", "shared", "dim", "size", "window"),
    [(4, 2, 16, 4, None), (3, 3, 10, 16, 7), (16, 1, 32, 8, None), (20, 1, 16, 4, 70)],
)
def test_a_token_of_each_sequence_sees_what_the_definition_sees(
    heads: int, shared: int, dim: int, size: int, window: int | None, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    in_parts_of_64(monkeypatch)
    # One token, a block, one more, none at all, and many tiles of keys.
    lengths = [1, size, size + 1, 0, 300]
    keys, values, tables = blocks(lengths, shared, size, dim, dtype)
    query = random_of(5, heads + 2, dim, dtype=dtype, gradient=False)[:, 1:-1]
    given = query, keys, values, tables, torch.tensor(lengths, dtype=torch.int32)
    made = paged_decode(*given, scale=0.3, window=window)
    assert_close(made, paged_decode(*given, scale=0.3, window=window, kernels=False), dtype)
    assert not made[3].any()


def test_a_context_read_by_one_program_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_file = pytest.importorskip("shardwise.kernels.paged_decode_triton")
    monkeypatch.setattr(triton_file, "count_parts", lambda *_: (1, 64))
    lengths = [5, 0, 130]
    keys, values, tables = blocks(lengths, 2, 16, 16, torch.float32)
    given = random_of(3, 4, 16, gradient=False), keys, values, tables, torch.tensor(lengths, dtype=torch.int32)
    for window in (None, 9):
        made = paged_decode(*given, scale=0.25, window=window)
        assert_close(made, paged_decode(*given, scale=0.25, window=window, kernels=False), torch.float32)


@every_type
@pytest.mark.parametrize(
    ("heads", "shared", "dim", "size", "window"), [(4, 2, 16, 4, None), (2, 1, 10, 16, 5), (2, 2, 16, 16, 100)]
)
def test_pieces_of_prompts_see_what_is_cached_and_themselves(
    heads: int, shared: int, dim: int, size: int, window: int | None, dtype: torch.dtype
) -> None:
    counts, before = [3, 1, 150, 17], [0, 12, 70, 130]
    lengths = [count + cached for count, cached in zip(counts, before, strict=True)]
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    keys, values, tables = blocks(lengths, shared, size, dim, dtype)
    query = random_of(starts[-1], heads, dim, dtype=dtype, gradient=False)
    wanted = paged_attention_plain(query, keys, values, tables, lengths, starts, scale=0.3, window=window)
    for kernels in (True, False):
        made = torch.zeros_like(query)
        told, begins, tiles = (
            torch.tensor(each, dtype=torch.int32) for each in (lengths, starts, make_tiles(starts, 1))
        )
        paged_prefill(query, keys, values, tables, told, begins, tiles, made, scale=0.3, window=window, kernels=kernels)
        assert not made[: starts[1]].any()
        assert_close(made[starts[1] :], wanted[starts[1] :], dtype)


@pytest.mark.parametrize(
    ("counts", "window", "dtype"),
    [([1, 5, 16], None, torch.float32), ([1, 5, 16], 40, torch.bfloat16), ([1, 150, 3], None, torch.float32)],
)
def test_a_short_piece_behind_a_long_beginning_is_read_in_parts(
    counts: list[int], window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton_file = pytest.importorskip("shardwise.kernels.paged_attention_triton")
    monkeypatch.setattr(triton_file, "count_prefill_parts", lambda *_: 5)
    monkeypatch.setattr(triton_file, "FEWEST_TOKENS", 64)
    lengths = [count + cached for count, cached in zip(counts, [3, 70, 400], strict=True)]
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    keys, values, tables = blocks(lengths, 2, 16, 16, dtype)
    query = random_of(starts[-1], 4, 16, dtype=dtype, gradient=False)
    wanted = paged_attention_plain(query, keys, values, tables, lengths, starts, scale=0.3, window=window)
    tile, made = tile_of(starts, 1), torch.zeros_like(query)
    assert tile == (16 if max(counts) == 16 else 128)
    told, begins, tiles = (
        torch.tensor(each, dtype=torch.int32) for each in (lengths, starts, make_tiles(starts, 1, tile))
    )
    paged_prefill(query, keys, values, tables, told, begins, tiles, made, scale=0.3, window=window, tile=tile)
    assert_close(made[starts[1] :], wanted[starts[1] :], dtype)
