"""Attention of a decode step: the newest token written, and seen with all before it."""

import pytest
import torch
from torch import Tensor

from shardwise.kernels.decode_step import decode_step
from tests.kernels.against import STEP, random_of
from tests.kernels.test_cache_write import turn
from tests.kernels.test_paged_attention import blocks, in_parts_of_64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.whole)])
@pytest.mark.parametrize(
    ("heads", "shared", "dim", "size", "window", "how"),
    [
        (4, 2, 16, 4, None, {"angles": True, "norms": True}),
        (3, 3, 10, 16, 7, {"angles": True, "norms": False}),
        (6, 1, 16, 8, None, {"angles": True, "norms": True, "interleaved": True}),
        (20, 1, 16, 4, 70, {"angles": False, "norms": False}),
    ],
)
def test_a_step_is_a_write_and_a_decode(
    heads: int, shared: int, dim: int, size: int, window: int | None, how: dict[str, bool], dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    in_parts_of_64(monkeypatch)
    # The first token of all, one that fills a block, one that begins one, a row of nobody, and one with many parts.
    lengths = [1, size, size + 1, 0, 300, 65]
    keys, values, tables = blocks(lengths, shared, size, dim, dtype)
    rows = random_of(len(lengths), (heads + 2 * shared) * dim + 3, dtype=dtype, gradient=False)[:, :-3]
    turning, counters = turn(dim, dtype, **how), torch.zeros(len(lengths) * shared, dtype=torch.int32)
    if turning.cosine is not None and turning.sine is not None:
        angles = torch.randn(300, dim // 2)
        turning = type(turning)(
            cosine=angles.cos(), sine=angles.sin(), interleaved=turning.interleaved, q_norm=turning.q_norm,
            k_norm=turning.k_norm,
        )  # fmt: skip

    def made(kernels: bool) -> tuple[Tensor, Tensor, Tensor]:
        own = keys.clone(), values.clone()
        told = torch.tensor(lengths, dtype=torch.int32)
        seen = decode_step(
            rows, *own, tables, told, turning, scale=0.3, window=window, counters=counters, kernels=kernels
        )  # fmt: skip
        return seen, *own

    ours = made(True)
    for one, other in zip(ours, made(False), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert (one.double() - other.double()).abs().max() <= 8 * STEP[dtype] * max(1.0, float(other.abs().max()))
    seen, new_keys, _ = ours
    assert not seen[3].any()
    # One key a sequence and KV head, and nothing else.
    assert (new_keys != keys).any(-1).sum() == 5 * shared
    assert not counters.any()
