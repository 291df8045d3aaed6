"""Linear layers in 8 bits: the kernels that cast against their definition, and the layer against one in float32."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.kernels.fp8 import E4M3, E5M2, LARGEST, Scaled, Scales, fp8_linear, multiply, quantise_both
from tests.kernels.against import random_of

SCALES: tuple[Scales, ...] = ("tensor", "row")
#: Rounding of e4m3 (3 bits) and e5m2 (2 bits) with both factors rounded, as a part of a product's norm.
CLOSE = 0.08


def assert_cast_alike(x: Tensor, scales: Scales, kind: torch.dtype) -> None:
    mine = quantise_both(x, kind, scales, kernels=True)
    plain = quantise_both(x, kind, scales, kernels=False)
    for one, other in zip(mine, plain, strict=True):
        assert one is not None
        assert other is not None
        assert one.numbers.dtype is other.numbers.dtype is kind
        assert one.numbers.shape == other.numbers.shape
        assert one.numbers.is_contiguous()
        torch.testing.assert_close(one.scale, other.scale, rtol=2**-22, atol=0)
        # Triton's interpreter leaves out numbers below the smallest normal one of e4m3. On a GPU a scale may be off by
        # one step of float32, and with it what lies in the middle of two others: of 16-bit numbers a few in 1,000.
        lost = 0.0 if x.is_cuda or kind is E5M2 else 2.0**-6
        made, expected = one.numbers.float(), other.numbers.float()
        differs = (made - expected).abs() > lost
        assert differs.float().mean() <= (3e-3 if x.is_cuda else 0)
        torch.testing.assert_close(made, expected, rtol=0.25, atol=lost)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.whole), torch.bfloat16])
def test_casts_by_rows_and_columns_are_those_of_the_definition(dtype: torch.dtype) -> None:
    shapes = ((33, 48), (1, 20))
    for (height, width), scales, kind in product(shapes, SCALES, (E4M3, E5M2)):
        assert_cast_alike(random_of(height, width, dtype=dtype, gradient=False), scales, kind)


def test_numbers_that_do_not_lie_in_one_piece_are_cast_as_they_are() -> None:
    whole = random_of(40, 80, gradient=False)
    for scales in SCALES:
        assert_cast_alike(whole[:, 16:64], scales, E4M3)
        assert_cast_alike(whole.t(), scales, E5M2)
        assert_cast_alike(whole[:1].expand(32, -1), scales, E5M2)
        assert_cast_alike(torch.zeros(16, 32), scales, E4M3)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("number", [torch.nan, -torch.inf])
def test_what_is_not_finite_makes_its_products_not_finite(number: float, scales: Scales, kernels: bool) -> None:
    x, weight = random_of(32, 48), random_of(64, 48)
    with torch.no_grad():
        x[3, 5] = number
    made = fp8_linear(x, weight, scales=scales, kernels=kernels)
    assert not made[3].isfinite().any()
    if scales == "row":
        assert made[4:].isfinite().all()
    (of_weight,) = torch.autograd.grad(made.sum(), weight)
    assert not of_weight.isfinite().all()


def test_the_largest_number_becomes_the_largest_of_the_type() -> None:
    x = torch.tensor([[1.0, -8.0], [0.5, 2.0]])
    rows, columns = quantise_both(x, E4M3, kernels=False)
    assert rows is not None
    assert columns is not None
    assert rows.scale == 8.0 / LARGEST[E4M3]
    assert rows.numbers.float().tolist() == [[56.0, -448.0], [28.0, 112.0]]
    # Columns become rows, filled to 16 numbers with zeros.
    assert columns.numbers.float()[:, :2].tolist() == [[56.0, 28.0], [-448.0, 112.0]]
    assert columns.numbers.shape == (2, 16)
    assert not columns.numbers.float()[:, 2:].any()


def test_a_scale_for_each_row_keeps_small_rows_beside_large_ones() -> None:
    x = torch.ones(2, 32)
    x[0] *= 1e6
    found = {each: quantise_both(x, E4M3, each, kernels=False)[0] for each in SCALES}
    wide = {each: made.wide() for each, made in found.items() if made is not None}
    assert wide["tensor"][1].abs().max() == 0.0
    torch.testing.assert_close(wide["row"], x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scales", SCALES)
def test_a_layer_and_its_gradients_are_as_near_as_eight_bits_are(scales: Scales, dtype: torch.dtype) -> None:
    given = random_of(3, 7, 32, dtype=dtype), random_of(48, 32, dtype=dtype), random_of(48, dtype=dtype)
    made, plain = fp8_linear(*given, scales=scales), nn.functional.linear(*(each.float() for each in given))
    slope = torch.randn_like(plain)
    found = torch.autograd.grad(made, given, slope.to(dtype))
    for one, other in zip((made, *found), (plain, *torch.autograd.grad(plain, given, slope)), strict=True):
        assert one.dtype is dtype
        assert (one - other).norm() < CLOSE * other.norm()
        # Rounding of 3 bits and none at all would both be mistakes.
        if one.dim() > 1:
            assert (one - other).norm() > 0.01 * other.norm()


def test_a_product_is_that_of_the_numbers_and_their_scales() -> None:
    left = Scaled(torch.tensor([[1.0, 2.0]]).to(E4M3), torch.tensor(3.0))
    right = Scaled(torch.tensor([[4.0, 0.5], [1.0, 1.0]]).to(E4M3), torch.tensor([[1.0], [10.0]]))
    bias = torch.tensor([1.0, 2.0])
    made = multiply(left, right, torch.float32, bias, products=False, fast=False)
    assert made.tolist() == [[3 * 5.0 + 1, 3 * 3.0 * 10 + 2]]


# The compiler makes an object of the class of a function, which torch advises against.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("scales", ["tensor", pytest.param("row", marks=pytest.mark.whole)])
def test_a_compiler_sees_all_of_it(scales: Scales) -> None:
    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return fp8_linear(torch.relu(x), weight, bias, scales=scales, products=False).float().square().sum()

    given = random_of(2, 9, 32), random_of(48, 32), random_of(48)
    expected = run(*given)
    found = torch.compile(run, backend="aot_eager", fullgraph=True)(*given)
    # On a GPU the definition is compiled, and kernels are not.
    torch.testing.assert_close(found, expected, rtol=1e-4 if found.is_cuda else 0, atol=0)
    near: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-5} if found.is_cuda else {}
    for one, other in zip(torch.autograd.grad(found, given), torch.autograd.grad(expected, given), strict=True):
        torch.testing.assert_close(one, other, **near)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_products_of_the_device_have_gradients() -> None:
    """A CPU has them too, in torch. A compiler may take their output for one that nothing is to be learned from."""

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return fp8_linear(torch.nn.functional.silu(x), weight, products=True, kernels=False)

    given = tuple(random_of(*shape, dtype=torch.bfloat16) for shape in ((32, 32), (48, 32)))
    slope = torch.randn(32, 48).bfloat16()
    pairs = [torch.autograd.grad(each(*given), given, slope) for each in (run, torch.compile(run, backend="aot_eager"))]
    for one, other in zip(*pairs, strict=True):
        assert (one - other).norm() < 0.05 * one.norm()


def test_what_is_kept_for_the_backward_is_of_eight_bits() -> None:
    kept: list[Tensor] = []
    x, weight = random_of(64, 32), random_of(48, 32)

    def keep(each: Tensor) -> Tensor:
        kept.append(each)
        return each

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        fp8_linear(x, weight, kernels=False)
    narrow = [each for each in kept if each.dtype is E4M3]
    assert [each.shape for each in narrow] == [(32, 64)]
    assert all(each is weight or each.numel() == 1 for each in kept if each.dtype is not E4M3)


def test_a_backward_in_halves_makes_each_gradient_once() -> None:
    x, weight = random_of(32, 32), random_of(48, 32)
    made = fp8_linear(x, weight)
    slope = torch.randn_like(made)
    both = torch.autograd.grad(made, (x, weight), slope, retain_graph=True)
    (first,) = torch.autograd.grad(made, x, slope, retain_graph=True)
    (second,) = torch.autograd.grad(made, weight, slope)
    assert torch.equal(first, both[0])
    assert torch.equal(second, both[1])


def test_no_rows_are_no_trouble() -> None:
    x, weight = random_of(0, 32), random_of(48, 32)
    made = fp8_linear(x, weight)
    assert made.shape == (0, 48)
    assert not torch.autograd.grad(made.sum(), weight)[0].any()
