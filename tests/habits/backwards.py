"""Backwards that users bend: hooks of tensors and modules, functions of their own; and what only training does."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.habits.harness import Net, Parallelize, Result, batch, cross_entropy, program, sgd, start, trained

BENT = dict.fromkeys(("dp", "pp", "cp"), "the backward is not in proportion to the gradient that it begins with")
SEES_ALL = dict.fromkeys(("dp", "pp"), "in training mode the loss of 3 rows is")


class Block(nn.Module):
    """Two layers, and something between them."""

    def __init__(self, between: Callable[["Block", Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(8, 16), nn.Linear(16, 8), nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(torch.tanh(self.between(self, self.up(x))))
        return made


def net(between: Callable[[Block, Tensor], Tensor]) -> Net:
    return Net(block=lambda: Block(between)).double()


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1e-3, 1e-3)


class Reversed(Clipped):
    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return -0.3 * gradient


def hooked(change: Callable[[Tensor], Tensor]) -> Callable[[Block, Tensor], Tensor]:
    def between(block: Block, h: Tensor) -> Tensor:
        h = h * block.scale
        if h.requires_grad:
            h.register_hook(change)  # type: ignore[no-untyped-call]
        return h

    return between


@program(BENT)
def gradients_clamped_in_the_forward(parallelize: Parallelize) -> Result:
    """`h.register_hook(lambda g: g.clamp(...))`, as in recurrent nets."""
    return trained(start(parallelize, net(hooked(lambda gradient: gradient.clamp(-1e-3, 1e-3)))))


@program(BENT)
def gradients_clamped_where_none_is_so_large(parallelize: Parallelize) -> Result:
    """The same with a bound that the example does not reach."""
    return trained(start(parallelize, net(hooked(lambda gradient: gradient.clamp(-10, 10)))))


@program()
def gradients_doubled_in_the_forward(parallelize: Parallelize) -> Result:
    """A hook that multiplies is right for parts too."""
    return trained(start(parallelize, net(hooked(lambda gradient: gradient * 2))))


@program(BENT)
def a_function_that_clips(parallelize: Parallelize) -> Result:
    """An `autograd.Function` that clips what comes back."""
    return trained(start(parallelize, net(lambda _, h: Clipped.apply(h))))  # type: ignore[no-untyped-call]


@program()
def a_function_that_turns_round(parallelize: Parallelize) -> Result:
    """A gradient reversal layer."""
    return trained(start(parallelize, net(lambda _, h: Reversed.apply(h))))  # type: ignore[no-untyped-call]


@program(BENT)
def a_backward_hook_that_normalises(parallelize: Parallelize) -> Result:
    """`register_full_backward_hook` that gives a gradient of one length."""
    model = Net().double()

    def normalised(_: nn.Module, given: Any, __: Any) -> Any:
        return tuple(each / each.norm() for each in given)

    model.layers[1].register_full_backward_hook(normalised)
    return trained(start(parallelize, model))


@program(dict.fromkeys(("dp", "pp", "cp"), "a hook of head.weight"))
def a_weight_clamped_and_a_pair_for_a_loss(parallelize: Parallelize) -> Result:
    """A hook of a parameter sees the gradient of the mean, also where the loss gives a sum and its number."""
    model = Net().double()
    model.head.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))  # type: ignore[no-untyped-call]

    def summed(output: Tensor, given: Any) -> Any:
        return cross_entropy(output, given) * given["labels"].numel(), given["labels"].numel()

    return trained(start_with(parallelize, model, summed))


@program(dict.fromkeys(("dp", "pp", "cp"), "the number that the loss is summed over has a gradient itself"))
def a_number_that_is_learned(parallelize: Parallelize) -> Result:
    """Tokens weighed by what the model says of them, and divided by the sum of these weights."""

    def weighed(output: Tensor, given: Any) -> Any:
        weights = output[..., 0].sigmoid()
        losses = nn.functional.cross_entropy(output.transpose(1, 2), given["labels"], reduction="none")
        return (losses * weights).sum(), weights.sum()

    return trained(start_with(parallelize, Net().double(), weighed))


@program(SEES_ALL)
def rows_that_see_each_other_in_training(parallelize: Parallelize) -> Result:
    """The mean over the batch is taken off, in training alone."""

    def between(block: Block, h: Tensor) -> Tensor:
        return h - h.mean(0, keepdim=True) if block.training else h

    return trained(start(parallelize, net(between)))


@program()
def something_else_in_training(parallelize: Parallelize) -> Result:
    """Training mode does something else, for each row by itself."""
    return trained(start(parallelize, net(lambda block, h: h * 2 if block.training else h)))


def start_with(parallelize: Parallelize, model: nn.Module, loss: Any) -> Any:
    return parallelize(model, loss=loss, optimizer=sgd, example=batch(0))


MIXED = dict.fromkeys(("dp", "microbatches"), "have the loss of the whole, but not the gradient of")


@program(MIXED)
def gradients_of_rows_are_centred(parallelize: Parallelize) -> Result:
    """`h.register_hook(lambda g: g - g.mean(0))`: rows see each other in the backward alone."""
    return trained(start(parallelize, net(hooked(lambda gradient: gradient - gradient.mean(0)))))


@program(MIXED)
def a_straight_through_mean_of_rows(parallelize: Parallelize) -> Result:
    """`h + m - m.detach()`, with the mean of all rows: its value is `h`, and its gradient is not."""
    return trained(start(parallelize, net(lambda _, h: h + h.mean(0) - h.mean(0).detach())))


@program({"all": r"the forward hooks a gradient at .*without gradients, as evaluations are"})
def gradients_kept_without_a_question(parallelize: Parallelize) -> Result:
    """`h.retain_grad()` in a forward, which fails in evaluations by plain torch too."""

    def keep(_: Block, h: Tensor) -> Tensor:
        h.retain_grad()
        return h

    return trained(start(parallelize, net(keep)))
