"""Products with weights of fewer bits, of one row, of some, and of many."""

from typing import Any

import pytest
import torch

from shardwise.cost.serving import WEIGHT_BYTES
from shardwise.kernels.few_rows_linear import few_rows_linear
from shardwise.kernels.gated import Activation
from shardwise.kernels.narrow import KINDS, make_narrow
from shardwise.kernels.row_linear import row_linear
from shardwise.kernels.widen import widen
from tests.kernels.against import STEP, random_of

HALVES = [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.whole)]


@pytest.mark.parametrize("kind", KINDS)
def test_they_take_as_many_bytes_as_the_planner_counts(kind: str) -> None:
    narrow = make_narrow(torch.randn(8, 1024), kind)
    scales = narrow.scales.nbytes if kind == "int4" else 0  # One for a whole row is next to nothing.
    assert narrow.codes.nbytes + scales == WEIGHT_BYTES[kind] * 8 * 1024


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(2, 19, 700), (5, 64), (17, 129)])
def test_a_kernel_makes_them_wide_as_the_definition_does(kind: str, shape: tuple[int, ...]) -> None:
    narrow = make_narrow(random_of(*shape, dtype=torch.bfloat16, gradient=False), kind)
    made, plain = widen(narrow), narrow.wide()
    assert made.dtype == plain.dtype == torch.bfloat16
    assert narrow.shape == made.shape == plain.shape == shape
    # The last bit may differ: a product and a sum are rounded once or twice, and the interpreter cuts bits off.
    assert ((made - plain).double().abs() <= 2 * STEP[torch.bfloat16] * plain.double().abs() + 1e-6).all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n", "k", "has"), [(7, 40, ()), (9, 1100, ("residual", "norm")), (10, 384, ("residual", "norm", "gate", "bias"))]
)
def test_one_row_comes_out_as_by_the_definition(
    n: int, k: int, has: tuple[str, ...], kind: str, dtype: torch.dtype
) -> None:
    def of(name: str, *shape: int) -> torch.Tensor | None:
        return random_of(*shape, dtype=dtype, gradient=False) if name in has else None

    activation: Activation | None = "silu" if "gate" in has else None
    x, weight = (random_of(count, k, dtype=dtype, gradient=False) for count in (1, n))
    narrow, bias, residual, norm = make_narrow(weight, kind), of("bias", n), of("residual", 1, k), of("norm", k)
    (made, new), (plain, plain_new) = (
        row_linear(x, narrow, bias, residual=residual, norm=norm, activation=activation, kernels=kernels)
        for kernels in (True, False)
    )
    assert (made.dtype, made.shape) == (plain.dtype, plain.shape)
    assert (new.double() - plain_new.double()).abs().max() <= 2 * STEP[dtype] * float(plain_new.abs().max())
    assert (made.double() - plain.double()).abs().max() <= 8 * STEP[dtype] * float(plain.abs().max())


@pytest.mark.parametrize(
    ("kind", "is_whole"), [("fp8", False), ("fp8", True), ("int4", False), ("int4", True), ("bf16", False)]
)
def test_sums_of_columns_that_are_split_over_programs_are_added(
    kind: str, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, as products follow each other: what one leaves in its counters is what the next begins with. Tiles of
    codes are multiplied place by place, and as a whole."""
    from shardwise.kernels import few_rows_linear_triton as kernel

    monkeypatch.setattr(kernel, "FEWEST_TILES", 1)
    for has_gate in (False, True):
        tile = kernel.Tile(64, 256 if kind == "fp8" and not has_gate else 128, 3, 4, 3, is_whole)
        monkeypatch.setitem(kernel.NARROW_TILES, (kind, has_gate), dict.fromkeys((16, 32, 64), tile))
        monkeypatch.setattr(kernel, "GATED" if has_gate else "NARROW", tile)
    x, weight, bias = (
        random_of(*shape, dtype=torch.bfloat16, gradient=False) for shape in ((3, 640), (70, 640), (70,))
    )
    narrow = weight if kind == "bf16" else make_narrow(weight, kind)
    asked: list[int] = []

    def launch(program: Any, grid: tuple[int, ...], *given: Any, **options: Any) -> None:
        asked.append(grid[2])
        program[grid](*given, **options)

    monkeypatch.setattr(kernel, "launch", launch)
    activations: tuple[Activation | None, ...] = (None, "silu")
    for activation in activations:
        made, plain = (
            few_rows_linear(x, narrow, bias, activation=activation, kernels=kernels) for kernels in (True, False)
        )
        assert (made.double() - plain.double()).abs().max() <= 8 * STEP[torch.bfloat16] * float(plain.abs().max())
    assert min(asked) > 1
    assert not kernel.counters_of(x.device).any()


@pytest.mark.parametrize(
    ("num_tiles", "num_columns", "wanted", "parts"),
    [
        (64, 16, 396, 4),
        (192, 16, 264, 1),
        (64, 48, 396, 6),
        (2, 16, 396, 4),
        (8, 22, 40, 5),
        (64, 16, 0, 1),
        (9999, 16, 396, 1),
    ],
)
def test_columns_are_split_where_programs_are_few(num_tiles: int, num_columns: int, wanted: int, parts: int) -> None:
    from shardwise.kernels.few_rows_linear_triton import count_column_parts

    assert count_column_parts(num_tiles, num_columns, wanted) == parts


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "n", "k", "has"),
    [
        (2, 7, 128, ()),
        (33, 70, 384, ("gate", "bias")),
        (130, 5, 128, ()),
        (3, 6, 200, ("gate",)),
        pytest.param(128, 130, 256, ("bias",), marks=pytest.mark.whole),
    ],
)
def test_rows_come_out_as_by_the_definition(
    rows: int, n: int, k: int, has: tuple[str, ...], kind: str, dtype: torch.dtype
) -> None:
    """Of few rows, of two tiles of them, and, where those are too many or lie amiss, by a weight made wide."""
    x, weight = (random_of(count, k, dtype=dtype, gradient=False) for count in (rows, n))
    narrow = make_narrow(weight, kind)
    bias = random_of(n, dtype=dtype, gradient=False) if "bias" in has else None
    activation: Activation | None = "silu" if "gate" in has else None
    made, plain = (
        few_rows_linear(x, narrow, bias, activation=activation, kernels=kernels) for kernels in (True, False)
    )
    assert (made.dtype, made.shape) == (plain.dtype, plain.shape)
    assert (made.double() - plain.double()).abs().max() <= 8 * STEP[dtype] * float(plain.abs().max())
