"""Parameters that are read elsewhere than in their own module: by the loss, or by the forward of another."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.habits.harness import Net, Parallelize, Result, batch, cross_entropy, program, sgd, small_net, trained

GONE = {
    "zero=3": "the loss reads",
    "pp": "the loss reads",
    "offload.parameters=1.0": "the loss reads",
}
LAST = {key: words for key, words in GONE.items() if key != "pp"}


@program(GONE)
def a_penalty_in_the_loss(parallelize: Parallelize) -> Result:
    """A regulariser of all weights: a rank must have them when the loss is computed."""
    model = small_net()

    def loss(output: Tensor, given: Any) -> Tensor:
        every = [each.square().sum() for each in model.parameters() if each.dim() > 1]
        return cross_entropy(output, given) + 1e-2 * torch.stack(every).sum()

    return trained(parallelize(model, loss=loss, optimizer=sgd, example=batch(0)))


@program(LAST)
def a_penalty_of_the_head(parallelize: Parallelize) -> Result:
    """Of one layer, the last: the stage that computes the loss has it."""
    model = small_net()

    def loss(output: Tensor, given: Any) -> Tensor:
        return cross_entropy(output, given) + 1e-2 * model.head.weight.square().mean()

    return trained(parallelize(model, loss=loss, optimizer=sgd, example=batch(0)))


@program()
def shapes_read_in_the_loss(parallelize: Parallelize) -> Result:
    """No numbers are asked for."""
    model = small_net()

    def loss(output: Tensor, given: Any) -> Tensor:
        return cross_entropy(output, given) / len(list(model.parameters())) * model.norm.weight.ndim

    return trained(parallelize(model, loss=loss, optimizer=sgd, example=batch(0)))


class Penalised(Net):
    """The forward returns scores that hang on a weight of another layer."""

    def forward(self, x: Tensor) -> Tensor:
        bias = self.get_parameter("layers.0.up.bias")
        return super().forward(x) * (1 + 1e-2 * bias.square().sum())


@program(only="dp")
def a_weight_of_another_layer_in_the_forward(parallelize: Parallelize) -> Result:
    """Read by the root, behind all layers."""
    return trained(parallelize(Penalised().double(), loss=cross_entropy, optimizer=sgd, example=batch(0)))


class Criterion(nn.Module):
    """A loss that is a module, without parameters."""

    def forward(self, output: Tensor, given: Any) -> Tensor:
        return cross_entropy(output, given)


@program()
def a_loss_that_is_a_module(parallelize: Parallelize) -> Result:
    """Which most are."""
    return trained(parallelize(small_net(), loss=Criterion(), optimizer=sgd, example=batch(0)))
