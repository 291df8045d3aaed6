"""A step's keys and values into their blocks."""

import pytest
import torch
from torch import Tensor

from shardwise.kernels.cache_write import Turn, write_cache
from tests.kernels.against import STEP, random_of


def turn(dim: int, dtype: torch.dtype, *, angles: bool, norms: bool, interleaved: bool = False) -> Turn:
    turned = torch.randn(40, dim // 2)
    return Turn(
        cosine=turned.cos() if angles else None,
        sine=turned.sin() if angles else None,
        interleaved=interleaved,
        q_norm=random_of(dim, dtype=dtype, gradient=False) if norms else None,
        k_norm=random_of(dim, dtype=dtype, gradient=False) if norms else None,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.whole)])
@pytest.mark.parametrize(
    ("heads", "shared", "dim", "how"),
    [
        (4, 2, 16, {"angles": True, "norms": True}),
        (3, 1, 10, {"angles": True, "norms": False}),
        (8, 8, 8, {"angles": True, "norms": True, "interleaved": True}),
        (2, 2, 6, {"angles": False, "norms": False}),
    ],
)
def test_queries_come_back_and_keys_and_values_go_to_their_slots(
    heads: int, shared: int, dim: int, how: dict[str, bool], dtype: torch.dtype
) -> None:
    cache = torch.zeros(6, 2, 2, shared, 4, dim, dtype=dtype)
    slots = torch.tensor([3, 17, -1, 8, 0, 23], dtype=torch.int32)
    positions = torch.tensor([0, 39, 5, 7, 7, 12], dtype=torch.int32)
    given = random_of(6, (heads + 2 * shared) * dim + 3, dtype=dtype, gradient=False)[:, :-3]
    turning = turn(dim, dtype, **how)

    def made(kernels: bool) -> tuple[Tensor, Tensor]:
        own = cache.clone()
        query = write_cache(given, own[:, 1, 0], own[:, 1, 1], positions, slots, turning, kernels=kernels)
        return query, own

    for one, other in zip(made(True), made(False), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert ((one != 0) == (other != 0)).all()
        # The interpreter cuts digits off where a GPU rounds, twice here.
        assert (one.double() - other.double()).abs().max() <= 4 * STEP[dtype] * float(other.abs().max())
    assert made(True)[1].ne(0).any(-1).sum() == 5 * 2 * shared


def test_no_tokens_write_nothing() -> None:
    cache = torch.zeros(1, 2, 1, 4, 8)
    none, turning = torch.empty(0), turn(8, torch.float32, angles=True, norms=False)
    made = write_cache(torch.empty(0, 24), cache[:, 0], cache[:, 1], none, none, turning)
    assert made.shape == (0, 1, 8)
