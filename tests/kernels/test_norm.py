"""RMS and layer norm, with a residual and without."""

import importlib

import pytest
import torch
from torch import Tensor

from shardwise import kernels
from shardwise.kernels.norm import add_rms_norm, rms_norm
from tests.kernels.against import assert_alike, random_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.whole)])
@pytest.mark.parametrize("shape", [(5, 37), (2, 3, 64), (1, 1), (0, 16), (3, 2100)])
def test_norms_are_those_of_their_definitions(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual = (random_of(*shape, dtype=dtype) for _ in range(2))
    weight, bias = (random_of(shape[-1], dtype=dtype) for _ in range(2))
    assert_alike(kernels.rms_norm, (x, weight), eps=1e-5)
    assert_alike(kernels.add_rms_norm, (x, residual, weight), eps=1e-5)
    if shape[-1] > 1:  # The deviation of one number is 0: its norm is rounding.
        assert_alike(kernels.layer_norm, (x, weight, bias))
        assert_alike(kernels.add_layer_norm, (x, residual, weight, bias))


def test_a_layer_norm_may_have_no_bias() -> None:
    assert_alike(kernels.layer_norm, (random_of(6, 48), random_of(48)))


def test_the_sums_of_many_programs_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = importlib.import_module("shardwise.kernels.norm_triton")  # Not above: the interpreter is chosen first.
    monkeypatch.setattr(programs, "SUMS", 2)
    monkeypatch.setattr(programs, "TILE", 16)
    assert_alike(kernels.layer_norm, (random_of(9, 24), random_of(24), random_of(24)))


def test_rows_may_lie_apart_or_in_another_order() -> None:
    weight = random_of(24)
    for x in (
        torch.randn(7, 48)[:, :24],  # The left half of a matrix.
        torch.randn(3, 5, 24).transpose(0, 1),
        torch.randn(24, 7).t(),
        torch.randn(1, 24).expand(4, 24),
        torch.randn(4, 6, 2, 24)[:, :, 1],
        torch.randn(4, 1, 2, 24)[:, :, 1:],
        torch.randn(2, 1, 5, 24).transpose(1, 2),  # One head, turned: contiguous, and its stride says nothing.
    ):
        given = x.detach().requires_grad_()
        assert_alike(kernels.rms_norm, (given, weight))
        assert_alike(kernels.add_rms_norm, (given, given, weight))


def test_the_gradient_of_one_head_may_come_turned() -> None:
    def turned(x: Tensor, weight: Tensor, kernels: bool) -> Tensor:
        return rms_norm(x, weight, kernels=kernels).transpose(1, 2) * torch.arange(5.0)[:, None]

    assert_alike(turned, (random_of(2, 5, 1, 24), random_of(24)))


def test_numbers_that_are_none_pass_through() -> None:
    x = torch.randn(4, 32)
    x[0, 3], x[1, 4], x[2, 5] = torch.nan, torch.inf, -torch.inf
    assert_alike(kernels.rms_norm, (x.requires_grad_(), random_of(32)))
    assert_alike(kernels.add_layer_norm, (x, random_of(4, 32), random_of(32)))


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_the_outputs_may_be_left_unused(used: int) -> None:
    def one_of(x: Tensor, residual: Tensor, weight: Tensor, kernels: bool) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, kernels=kernels)[used], weight * 1

    assert_alike(one_of, (random_of(5, 16), random_of(5, 16), random_of(16)))


def test_what_the_kernel_lacks_goes_to_the_definition_and_is_said_once() -> None:
    x, weight = torch.randn(3, 8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"the kernel of rms_norm has no torch.float64 .* its definition runs"):
        made = kernels.rms_norm(x, weight)
    torch.testing.assert_close(made, kernels.rms_norm(x, weight, kernels=False))
    kernels.rms_norm(x, weight)  # A second warning would fail the test.
