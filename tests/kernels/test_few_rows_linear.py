"""A linear layer of a few rows with its gate."""

import importlib
from typing import Any

import pytest
import torch

from shardwise.kernels.few_rows_linear import COLUMNS, MOST_ROWS, few_rows_linear
from shardwise.kernels.gated import Activation
from tests.kernels.against import STEP, random_of

KERNEL = "shardwise.kernels.few_rows_linear_triton"


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.whole)])
@pytest.mark.parametrize(
    ("rows", "n", "k", "has"),
    [
        (2, 7, 64, ()),
        (17, 130, 192, ("bias",)),
        (MOST_ROWS, 70, 640, ("activation",)),
        (5, 6, 128, ("activation", "bias")),
    ],
)
def test_few_rows_come_out_as_by_the_definition(
    rows: int, n: int, k: int, has: tuple[str, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[torch.dtype] = []
    kernel = importlib.import_module(KERNEL).forward

    def called(given: torch.Tensor, *others: Any) -> torch.Tensor:
        calls.append(given.dtype)
        made: torch.Tensor = kernel(given, *others)
        return made

    monkeypatch.setattr(f"{KERNEL}.forward", called)
    x, weight = (random_of(count, k, dtype=dtype, gradient=False) for count in (rows, n))
    bias = random_of(n, dtype=dtype, gradient=False) if "bias" in has else None
    activation: Activation | None = "silu" if "activation" in has else None
    made = few_rows_linear(x, weight, bias, activation=activation)
    plain = few_rows_linear(x, weight, bias, activation=activation, kernels=False)
    assert calls, "the kernel took it"
    assert (made.dtype, made.shape) == (plain.dtype, plain.shape)
    assert (made.double() - plain.double()).abs().max() <= 8 * STEP[dtype] * float(plain.abs().max())


@pytest.mark.parametrize(
    ("rows", "k", "dtype"),
    [
        (1, COLUMNS, torch.bfloat16),
        (MOST_ROWS + 1, COLUMNS, torch.bfloat16),
        (4, COLUMNS + 8, torch.bfloat16),
        (4, COLUMNS, torch.float32),
    ],
)
def test_what_a_library_has_is_left_to_it(
    rows: int, k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{KERNEL}.forward", None)
    x, weight = (random_of(count, k, dtype=dtype, gradient=False) for count in (rows, 9))
    assert torch.equal(few_rows_linear(x, weight), torch.nn.functional.linear(x, weight))
