"""A linear layer of one row with its norm and its gate."""

from typing import Any

import pytest
import torch

from shardwise.kernels.row_linear import row_linear
from tests.kernels.against import STEP, random_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.whole)])
@pytest.mark.parametrize(
    ("n", "k", "has", "whole_rows"),
    [
        (7, 40, (), 0),
        (33, 1500, ("residual", "norm"), 0),
        (10, 2048, ("norm", "activation"), 0),
        (6, 24, ("residual", "norm", "activation", "bias"), 0),
        (18, 300, ("residual", "norm", "activation"), 300),
    ],
)
def test_one_row_comes_out_as_by_the_definition(
    n: int, k: int, has: tuple[str, ...], whole_rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardwise.kernels import row_linear_triton as kernel

    monkeypatch.setattr(kernel, "WHOLE_ROWS", whole_rows)

    def of(*shape: int) -> torch.Tensor:
        return random_of(*shape, dtype=dtype, gradient=False)

    given: dict[str, Any] = {
        "bias": of(n) if "bias" in has else None,
        "residual": of(1, k) if "residual" in has else None,
        "norm": of(k) if "norm" in has else None,
        "activation": "silu" if "activation" in has else None,
    }
    x, weight = of(1, k), of(n, k)
    made, new = row_linear(x, weight, **given)
    plain, plain_new = row_linear(x, weight, **given, kernels=False)
    assert (made.dtype, made.shape) == (plain.dtype, plain.shape)
    assert (new.double() - plain_new.double()).abs().max() <= 2 * STEP[dtype] * float(plain_new.abs().max())
    steps = 16 if "activation" in has else 8  # A product of two sums has the errors of both.
    assert (made.double() - plain.double()).abs().max() <= steps * STEP[dtype] * float(plain.abs().max())
