"""Losses that take gradients themselves, or read what a forward has left in the module."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tests.habits.harness import (
    Batch,
    Net,
    Parallelize,
    Result,
    batch,
    cross_entropy,
    program,
    sgd,
    small_net,
    start,
    trained,
)

NOT_OF_PARTS = dict.fromkeys(("dp", "microbatches"), "in training mode the loss of 3 rows")
OTHER_NUMBERS = {"cp": "a part of a sequence gives other numbers than the whole"}


def _adaptive(parallelize: Parallelize, model: Net) -> Result:
    def loss(output: Tensor, given: Batch) -> Tensor:
        fit, size = cross_entropy(output, given), output.square().mean()
        if not torch.is_grad_enabled():
            return fit + size
        norms = [torch.autograd.grad(each, model.head.weight, retain_graph=True)[0].norm() for each in (fit, size)]
        total: Tensor = fit + (norms[0] / (norms[1] + 1e-4)).detach() * size
        return total

    return trained(parallelize(model, loss=loss, optimizer=sgd, example=batch(0)))


@program({**NOT_OF_PARTS, **OTHER_NUMBERS})
def a_term_weighed_by_gradients_of_the_last_layer(parallelize: Parallelize) -> Result:
    """VQGAN's adaptive weight: the ratio of two norms of gradients."""
    return _adaptive(parallelize, small_net())


@program(
    {**NOT_OF_PARTS, **OTHER_NUMBERS, "pp=2": "the gradient of head.weight .*the last of 2 stages has that of its"}
)
def the_same_of_a_tied_layer(parallelize: Parallelize) -> Result:
    """The first stage has the other half of that gradient."""
    return _adaptive(parallelize, small_net(tied=True))


class _Fractions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return made


def _fractions(seed: int, *, asks: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, 4, generator=generator, dtype=torch.float64)
    return {"x": x.requires_grad_(asks), "labels": torch.randint(12, (4, 3), generator=generator)}


ASKED = dict.fromkeys(("zero=3", "offload.parameters=1.0"), "gradients are asked for in a forward")


@program({**ASKED, "pp": r"the gradient of batch\['x'\] .*the last of 2 stages has that of its own"}, but="cp")
def a_penalty_on_gradients_of_the_inputs(parallelize: Parallelize) -> Result:
    """WGAN-GP's, and it takes no gradient for 0."""

    def loss(output: Tensor, given: Batch) -> Tensor:
        found = cross_entropy(output, given)
        if not torch.is_grad_enabled():
            return found
        (slope,) = torch.autograd.grad(output.sum(), given["x"], create_graph=True, allow_unused=True)
        slopes: list[Tensor | None] = [slope]
        for each in slopes:
            found = found if each is None else found + each.square().sum((1, 2)).mean()
        return found

    model = _Fractions().double()
    engine = parallelize(model, loss=loss, optimizer=sgd, example=_fractions(0, asks=True))
    found: dict[str, Any] = {f"loss {step}": engine.train_step(_fractions(step, asks=True)) for step in range(2)}
    return {**found, **engine.state_dict()}


@program({"all": "the loss asks for gradients itself, at weighing.py.*gradients off"}, but="cp")
def gradients_asked_for_in_evaluations_too(parallelize: Parallelize) -> Result:
    """There are none then, nor when the example is tried."""

    def loss(output: Tensor, given: Batch) -> Tensor:
        found = cross_entropy(output, given)
        return found + torch.autograd.grad(found, output, create_graph=True)[0].square().sum()

    return trained(parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0)))


READS = dict.fromkeys(("zero=3", "offload.parameters=1.0", "pp"), "the loss reads [0-9] parameters")


@program({**READS, **OTHER_NUMBERS})
def the_module_called_again_in_training_alone(parallelize: Parallelize) -> Result:
    """Virtual adversarial training: evaluations do not call it again."""
    model = _Fractions().double()

    def loss(output: Tensor, given: Batch) -> Tensor:
        found = cross_entropy(output, given)
        if not torch.is_grad_enabled():
            return found
        again: Tensor = model(given["x"] * 1.01)
        return found + (again - output.detach()).square().mean()

    engine = parallelize(model, loss=loss, optimizer=sgd, example=_fractions(0))
    return {**{f"loss {step}": engine.train_step(_fractions(step)) for step in range(2)}, **engine.state_dict()}


class _Leaves(nn.Module):
    """A block that leaves its hidden channels in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = torch.tanh(self.up(x))
        made: Tensor = x + self.down(self.hidden)
        return made


@program(OTHER_NUMBERS)
def hidden_channels_read_by_the_loss(parallelize: Parallelize) -> Result:
    """A penalty on activations that a block has left."""
    model = small_net(block=_Leaves)

    def loss(output: Tensor, given: Batch) -> Tensor:
        hidden: Tensor = model.layers[1].hidden  # type: ignore[assignment]
        return cross_entropy(output, given) + hidden.square().mean()

    return trained(parallelize(model, loss=loss, optimizer=sgd, example=batch(0)))


class _Warm(Net):
    """Its first layers compute without gradients in the first two forwards of training."""

    def __init__(self) -> None:
        super().__init__()
        self.num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += self.training
        with torch.no_grad() if self.num_forwards <= 2 else nullcontext():
            hidden = self.layers[0](self.embed(x))
        scores: Tensor = self.head(self.norm(self.layers[1](hidden)))
        return scores


@program({"pp": "in an earlier step it was float64.*whether a stage computes with gradients .* has changed"})
def first_steps_under_no_grad(parallelize: Parallelize) -> Result:
    """Layers that are trained from the third forward on."""
    return trained(start(parallelize, _Warm().double()), steps=4)


class _Halves(Net):
    """In training, half of the rows are mixed with the other half: three rows cannot be."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        if self.training:
            first, second = hidden[: len(hidden) // 2], hidden[len(hidden) // 2 :]
            hidden = torch.cat([first * 0.9 + second * 0.1, second])
        scores: Tensor = self.head(self.norm(hidden))
        return scores


@program(dict.fromkeys(("dp", "microbatches"), "in training mode the loss of 4 rows"))
def halves_of_a_batch_mixed_in_training(parallelize: Parallelize) -> Result:
    """Mixup of hidden states."""
    return trained(start(parallelize, _Halves().double()))


@program(but="cp", whole=True)
def a_mean_over_labels_other_than_3(parallelize: Parallelize) -> Result:
    """A class is left out, which is neither 0 nor -100."""

    def loss(output: Tensor, given: Batch) -> Tensor:
        counts = given["labels"] != 3
        found = nn.functional.cross_entropy(output.transpose(1, 2), given["labels"], reduction="none")
        return (found * counts).sum() / counts.sum()

    return trained(parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0)))


class _Weighs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, output: Tensor, given: Batch) -> Tensor:
        return cross_entropy(output, given) * torch.exp(-self.log) + self.log


@program(dict.fromkeys(("dp", "pp"), "1 parameters of its own that require a gradient"), but="cp")
def a_criterion_that_learns(parallelize: Parallelize) -> Result:
    """An optimizer of the script's own trains it, with the gradients that the steps have left."""
    criterion = _Weighs()
    engine = parallelize(small_net(), loss=criterion, optimizer=sgd, example=batch(0))
    learns = torch.optim.SGD(criterion.parameters(), lr=0.1)

    def between(step: int) -> dict[str, Tensor]:
        learns.step()
        learns.zero_grad()
        return {f"log {step}": criterion.log.detach().clone()}

    return trained(engine, between=between)
