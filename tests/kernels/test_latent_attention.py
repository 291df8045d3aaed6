"""Attention over short vectors in blocks."""

import importlib

import pytest
import torch

from shardwise.kernels.latent_attention import latent_decode
from tests.kernels.against import STEP, random_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.whole)])
@pytest.mark.parametrize(
    ("heads", "rank", "turned", "size", "window"), [(4, 32, 16, 4, None), (18, 20, 6, 16, None), (5, 16, 8, 8, 70)]
)
def test_a_token_of_each_sequence_sees_what_the_definition_sees(
    heads: int, rank: int, turned: int, size: int, window: int | None, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """More heads than a program has, sizes that fill no tile, blocks in no order of a cache of two layers; one token, a
    block, one more, none at all, and many tiles in several parts."""
    programs = importlib.import_module("shardwise.kernels.latent_attention_triton")
    monkeypatch.setattr(programs, "HEADS", 16)
    monkeypatch.setattr(programs, "count_parts", lambda *_: (6, 64))
    lengths = [1, size, size + 1, 0, 200]
    counts = [-(-length // size) for length in lengths]
    cache = torch.randn(sum(counts), 2, size, rank + turned).to(dtype)[:, 1]
    order = torch.randperm(sum(counts)).int()
    tables = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
    for row, count in enumerate(counts):
        tables[row, :count], order = order[:count], order[count:]
    query = random_of(len(lengths), heads + 1, rank + turned, dtype=dtype, gradient=False)[:, 1:]
    made, plain = (
        latent_decode(
            query, cache, tables, torch.tensor(lengths, dtype=torch.int32), rank=rank, scale=0.3, window=window,
            kernels=kernels,
        )
        for kernels in (True, False)
    )  # fmt: skip
    assert (made.dtype, made.shape) == (plain.dtype, plain.shape) == (dtype, (len(lengths), heads, rank))
    assert (made.double() - plain.double()).abs().max() <= 8 * STEP[dtype] * max(1.0, float(plain.abs().max()))
    assert not made[3].any()
