"""What losses and hooks count and log in closures: the state of a script, which trials leave as it was."""
# Programs as users write them.
# mypy: disable-error-code="no-any-return,union-attr"

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.habits.harness import Parallelize, Result, batch, cross_entropy, program, sgd, small_net, start, trained

#: Where a step computes the loss several times, a count of calls is none of steps.
SEVERAL = {"microbatches": "the loss remembers"}


def by(parallelize: Parallelize, loss: Any) -> Result:
    return trained(parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0)), steps=5)


@program(SEVERAL, but="cp")
def a_loss_that_counts_its_calls(parallelize: Parallelize) -> Result:
    """A warm-up of five steps, in a dictionary of the script."""
    state = {"calls": 0}

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        state["calls"] += 1
        return cross_entropy(output, given) * min(1.0, state["calls"] / 5)

    return by(parallelize, loss)


@program(SEVERAL, but="cp")
def a_loss_with_a_tensor_that_counts(parallelize: Parallelize) -> Result:
    """The same in place: `self.calls += 1`."""
    calls = torch.zeros((), dtype=torch.float64)

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        calls.add_(1)
        return cross_entropy(output, given) * (1 - torch.exp(-calls))

    return by(parallelize, loss)


class Relative:
    """A loss divided by a running mean of itself."""

    mean: float | None = None

    def __call__(self, output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        loss = cross_entropy(output, given)
        now = float(loss.detach())
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return loss / self.mean


@program({**SEVERAL, "dp": "the loss remembers"}, but="cp")
def a_loss_divided_by_its_own_mean(parallelize: Parallelize) -> Result:
    """Parts have losses of their own, and one process has the right one."""
    return by(parallelize, Relative())


@program(but="pp,cp")
def a_hook_that_counts(parallelize: Parallelize) -> Result:
    """What a layer returns depends on how often it was called."""
    model, calls = small_net(), [0]

    def changed(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        calls[0] += 1
        return output * (1 + 0.1 / calls[0])

    model.layers[0].register_forward_hook(changed)
    return trained(start(parallelize, model))


@program(only="tp", but="dp")
def hooks_that_keep_a_log(parallelize: Parallelize) -> Result:
    """`log.append(output.mean())`: before the first step it is empty."""
    model, log = small_net(), list[float]()
    for layer in (model.layers[0], model.layers[1].up):
        layer.register_forward_hook(lambda _, __, output: log.append(float(output.detach().mean())))
    engine = start(parallelize, model)
    return {"before": len(log), **trained(engine)}
