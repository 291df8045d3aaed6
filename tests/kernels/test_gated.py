"""The gate of an MLP."""

import pytest
import torch
from torch import Tensor

from shardwise import ShardwiseError, kernels
from shardwise.kernels.gated import Activation, gated
from tests.kernels.against import assert_alike, random_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.whole)])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gates_are_those_of_their_definitions(activation: Activation, dtype: torch.dtype) -> None:
    for shape in ((3, 5, 41), (7,), (0, 8), (2, 2500)):
        given = random_of(*shape, dtype=dtype), random_of(*shape, dtype=dtype)
        assert_alike(kernels.gated, given, activation=activation)


def test_gate_and_up_may_be_halves_of_one_product() -> None:
    def halves(both: Tensor, kernels: bool) -> Tensor:
        gate, up = both.chunk(2, -1)
        return gated(gate, up, kernels=kernels)

    def every_other(both: Tensor, kernels: bool) -> Tensor:
        return gated(both[..., ::2], both[..., 1::2], kernels=kernels)

    both = random_of(2, 3, 64)
    assert_alike(halves, (both,))
    assert_alike(every_other, (both,))


def test_numbers_that_are_none_pass_through() -> None:
    gate = torch.randn(4, 32)
    gate[0, 3], gate[3, 6] = torch.nan, -200.0
    assert_alike(kernels.gated, (gate, random_of(4, 32, gradient=False)), activation="gelu")
    # Of these torch's gelu is NaN on processors of one kind, and a number on others.
    gate[1, 4], gate[2, 5] = torch.inf, -torch.inf
    assert_alike(kernels.gated, (gate, random_of(4, 32, gradient=False)), activation="silu")


def test_an_activation_that_nobody_knows_is_named_with_the_nearest() -> None:
    with pytest.raises(ShardwiseError, match="unknown activation 'sillu'"):
        kernels.gated(torch.ones(2), torch.ones(2), "sillu")  # type: ignore[arg-type]
