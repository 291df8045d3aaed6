"""A backward in two halves is the backward, whatever the graph; and the halves are where they should be."""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from shardwise.execution import backward
from shardwise.execution.backward import full_backward, input_gradients

#: Makes outputs of inputs.
Forward = Callable[..., "Tensor | tuple[Tensor, ...]"]


class Attention(nn.Module):
    """Queries, keys and values from one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        return self.out(scaled_dot_product_attention(query, key, value, is_causal=True))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made, (hidden, _) = self.lstm(x)
        return made, hidden


class UsedTwice(nn.Module):
    """One layer, called twice, with another between."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.own = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(torch.tanh(self.own(torch.tanh(self.shared(x)))))  # type: ignore[no-any-return]


class Operand(nn.Module):
    """A weight as it is on both sides of matmuls: no layer, no transpose between it and the product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight) @ self.weight + x @ (self.weight @ self.weight)


class Added(nn.Module):
    """Two parameters of one shape, added: autograd gives both of them one and the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(3, 6)), nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + (self.first + self.second)) + self.first


class ManyToMany(nn.Module):
    """Two inputs, three outputs: one of both inputs, one of one, and one that no input matters to."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)
        self.alone = nn.Parameter(torch.randn(6))
        self.everywhere = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        left = torch.tanh(self.left(x)) * self.everywhere
        return left + self.right(y), left, self.alone.exp() * self.everywhere


class Indifferent(nn.Module):
    """Of its two inputs one does not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, ignored: Tensor) -> Tensor:  # noqa: ARG002 - that is the point
        return self.linear(x)  # type: ignore[no-any-return]


class Untouched(nn.Module):
    """It hands on its input, and has parameters that take no part."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.linear = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.linear(x)


class Unbound(nn.Module):
    """All of its outputs come from one node."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first, second, third = self.table.unbind()
        return first, second, third * x


def frozen_in_part() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    module[0].requires_grad_(False)
    return module


def wants(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)), lambda: (wants(3, 6),)),
    "one linear": (lambda: nn.Linear(6, 8), lambda: (wants(3, 6),)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 1)), lambda: (wants(2, 2, 6, 6),)),
    "batch norm": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU()),
        lambda: (wants(2, 2, 6, 6),),
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(7, 6), nn.LayerNorm(6), nn.Linear(6, 4)),
        lambda: (torch.randint(0, 7, (2, 5)),),
    ),
    "attention": (Attention, lambda: (wants(2, 5, 8),)),
    "lstm": (Recurrent, lambda: (wants(2, 4, 6),)),
    "a weight used twice": (UsedTwice, lambda: (wants(3, 6),)),
    "a weight used twice, no input": (UsedTwice, lambda: (torch.randn(3, 6),)),
    "a weight as an operand": (Operand, lambda: (wants(3, 6),)),
    "two weights added": (Added, lambda: (wants(3, 6),)),
    "two weights added, no input": (Added, lambda: (torch.randn(3, 6),)),
    "many to many": (ManyToMany, lambda: (wants(3, 6), wants(3, 6))),
    "many to many, one input": (ManyToMany, lambda: (wants(3, 6), torch.randn(3, 6))),
    "many to many, no input": (ManyToMany, lambda: (torch.randn(3, 6), torch.randn(3, 6))),
    "an input that does not matter": (Indifferent, lambda: (wants(3, 6), wants(3, 6))),
    "only an input that does not matter": (Indifferent, lambda: (torch.randn(3, 6), wants(3, 6))),
    "an input handed on": (Untouched, lambda: (wants(3, 6),)),
    "several outputs of one node": (Unbound, lambda: (wants(6),)),
    "several outputs of one node, no input": (Unbound, lambda: (torch.randn(6),)),
    "parameters without gradient": (frozen_in_part, lambda: (wants(3, 6),)),
    "no parameter with gradient": (lambda: nn.Linear(6, 6).requires_grad_(False), lambda: (wants(3, 6),)),
}

every_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(autouse=True)
def with_onednn() -> Iterator[None]:
    """An LSTM is one node with oneDNN, and without it a loop that uses its weights again and again."""
    before = bool(torch.backends.mkldnn.enabled)
    torch.backends.mkldnn.enabled = True  # type: ignore[assignment]
    yield
    torch.backends.mkldnn.enabled = before  # type: ignore[assignment]


def made_by(module: nn.Module, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that want a gradient, and a gradient for each."""
    made = module(*inputs)
    outputs = [each for each in (made if isinstance(made, tuple) else (made,)) if each.requires_grad]
    generator = torch.Generator().manual_seed(1)
    return outputs, [torch.randn(each.shape, generator=generator) for each in outputs]


def gradients_of(module: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    tensors = [*inputs, *module.parameters()]
    found = [each.grad for each in tensors]
    for each in tensors:
        each.grad = None
    return found


@every_case
def test_the_two_halves_together_are_the_backward(case: str) -> None:
    torch.manual_seed(0)
    make, make_inputs = CASES[case]
    module, inputs = make(), make_inputs()
    leaves = [each for each in inputs if each.requires_grad]
    # A second microbatch adds to the first in the parameters; inputs are its own.
    full_backward(*made_by(module, inputs))
    gradients_of(nn.Identity(), inputs)
    full_backward(*made_by(module, inputs))
    expected = gradients_of(module, inputs)
    for _ in range(2):
        outputs, gradients = made_by(module, inputs)
        input_gradients(outputs, gradients, leaves).run()
    read_only = {id(each.grad) for each in inputs}
    found = gradients_of(module, inputs)
    for wanted, ours in zip(expected, found, strict=True):
        assert (wanted is None) == (ours is None)
        if wanted is not None and ours is not None:
            torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)
    storages = [each.data_ptr() for each in found if each is not None and id(each) not in read_only]
    storages += {each.data_ptr() for each in found if each is not None and id(each) in read_only}
    assert len(storages) == len(set(storages)), "parameters' are scaled in place, so no two may be one tensor"


@every_case
def test_where_torch_lacks_its_private_engine_the_public_one_does_the_same(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backward, "engine_run_backward", None)
    test_the_two_halves_together_are_the_backward(case)


#: Where a weight is reached in two ways it is computed in the first half, and nothing else is.
AT_ONCE = {
    "a weight used twice": {"shared.weight", "shared.bias"},
    "a weight as an operand": {"weight"},
    "two weights added": {"first"},
    "many to many": {"everywhere"},
    "many to many, one input": {"everywhere"},
    "several outputs of one node": {"table"},
}


@every_case
def test_the_first_half_has_all_gradients_of_inputs_and_none_of_weights(case: str) -> None:
    torch.manual_seed(0)
    make, make_inputs = CASES[case]
    module, inputs = make(), make_inputs()
    leaves = [each for each in inputs if each.requires_grad]
    full_backward(*made_by(module, inputs))
    expected = [each.grad for each in inputs]
    gradients_of(module, inputs)
    rest = input_gradients(*made_by(module, inputs), leaves)
    for wanted, each in zip(expected, inputs, strict=True):
        torch.testing.assert_close(each.grad, wanted)
    assert {name for name, each in module.named_parameters() if each.grad is not None} == AT_ONCE.get(case, set())
    rest.run()


def test_a_loss_needs_no_gradient_given() -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(6, 1), wants(3, 6)
    module(x).sum().backward()
    expected = gradients_of(module, [x])
    input_gradients([module(x).sum()], [None], [x]).run()
    for wanted, ours in zip(expected, gradients_of(module, [x]), strict=True):
        torch.testing.assert_close(ours, wanted)


class Keep(torch.autograd.Function):
    """Saves a tensor for the backward, which nobody else holds."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, seen: list[weakref.ref[Tensor]]) -> Tensor:
        saved = x * 2
        seen.append(weakref.ref(saved))
        ctx.saved = saved  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved.sign().abs(), None  # type: ignore[attr-defined]


@pytest.mark.parametrize("has_input", [True, False])
def test_what_was_saved_is_held_until_the_second_half_has_run_and_no_longer(has_input: bool) -> None:
    seen: list[weakref.ref[Tensor]] = []
    below, above = nn.Linear(6, 6), nn.Linear(6, 6)
    x = wants(3, 6) if has_input else torch.randn(3, 6)
    gc.disable()  # Reference counts alone must do.
    try:
        kept: Tensor = Keep.apply(below(x), seen)  # type: ignore[no-untyped-call]
        rest = input_gradients([above(kept).sum()], [None], [x] if has_input else [])
        del kept
        assert seen[0]() is not None
        rest.run()
        assert seen[0]() is None
    finally:
        gc.enable()


class _Product(torch.autograd.Function):
    """A matrix product as a library of kernels would write it: one node for input and weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


def test_nodes_of_custom_functions_live_until_the_second_half() -> None:
    first, second = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    for ends_in_one in (True, False):
        x = wants(3, 4)
        made: Tensor = _Product.apply(torch.tanh(_Product.apply(x, first)), second)  # type: ignore[no-untyped-call]
        outputs = [made if ends_in_one else made.sin()]
        del made
        half = input_gradients(outputs, [torch.ones(3, 4)], [x])
        expected = torch.autograd.grad(outputs[0].sum(), [first, second], retain_graph=True)
        del outputs
        gc.collect()
        half.run()
        for weight, wanted in zip((first, second), expected, strict=True):
            assert weight.grad is not None
            torch.testing.assert_close(weight.grad, wanted)
            weight.grad = None


def test_a_graph_with_a_reentrant_checkpoint_is_run_at_once() -> None:
    layer = nn.Linear(3, 3)
    given = torch.ones(2, 3, requires_grad=True)
    made = checkpoint(layer, given * 2, use_reentrant=True).square().sum()
    halves = input_gradients([made], [None], [given])
    found = [given.grad, layer.weight.grad]
    halves.run()
    expected = torch.autograd.grad(layer(given * 2).square().sum(), [given, layer.weight])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
