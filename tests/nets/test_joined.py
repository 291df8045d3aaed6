"""Layers of one input as one product: where it pays, with the numbers and gradients of the layers one by one."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardwise.nets.feedforward import FeedForward
from shardwise.nets.joined import LEAST_TOKENS, linear_layers
from shardwise.nets.settings import Mlp

WIDTH = 8


def products_in(run: Callable[[Tensor], object], x: Tensor) -> int:
    """How many products torch compiles of a function."""
    found: list[int] = []

    def count(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        found.append(sum("linear" in str(node.target) for node in graph.graph.nodes if node.op != "placeholder"))
        return graph.forward

    torch.compiler.reset()
    torch.compile(run, backend=count, fullgraph=True)(x)
    return sum(found)


def layers(bias: bool = False) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(WIDTH, size, bias=bias) for size in (6, 2, 4))


@pytest.mark.parametrize("bias", [False, True])
def test_one_product_has_the_numbers_and_gradients_of_three(bias: bool) -> None:
    made = layers(bias)
    x = torch.randn(2, LEAST_TOKENS // 2, WIDTH)
    torch.compiler.reset()
    joined = torch.compile(lambda x: torch.cat(linear_layers(x, *made), -1), backend="aot_eager", fullgraph=True)
    expected = torch.cat([layer(x) for layer in made], -1)
    weights = list(made.parameters())
    torch.testing.assert_close(joined(x), expected)
    pairs = zip(
        torch.autograd.grad(joined(x).square().sum(), weights),
        torch.autograd.grad(expected.square().sum(), weights),
        strict=True,
    )
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def test_layers_are_joined_only_where_it_pays() -> None:
    made, many = layers(), torch.randn(1, LEAST_TOKENS, WIDTH)
    assert products_in(lambda x: linear_layers(x, *made), many) == 1
    assert products_in(lambda x: linear_layers(x, *made), many[:, 1:]) == 3
    assert products_in(lambda x: linear_layers(x, *made, kernels=False), many) == 3


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_a_layer_that_is_more_than_a_product_is_called() -> None:
    x = torch.randn(1, LEAST_TOKENS, WIDTH)
    mlp = FeedForward(WIDTH, Mlp(width=16))
    assert mlp.gate_proj is not None
    calls: list[int] = []
    assert products_in(mlp, x) == 2  # Gate and up as one, and down.
    mlp.up_proj.register_forward_hook(lambda *_: calls.append(1))
    assert products_in(mlp, x) == 3
    assert calls
    other = FeedForward(WIDTH, Mlp(width=16))
    other.gate_proj = Doubled(WIDTH, 16, bias=False)
    assert products_in(other, x) == 3
