"""The gradients of a bucket from step to step: of one that has none there is nothing left of the step before."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from shardwise.ranks.collectives import Group
from shardwise.ranks.cpu_exchange import CpuExchange
from shardwise.ranks.exchange import BufferPool
from shardwise.ranks.mesh import Replicas
from shardwise.states.buckets.flat_layout import BucketSpec, FlatLayout
from shardwise.states.buckets.gradients import ScatteredGradients, WholeGradients


def step(gradients: WholeGradients | ScatteredGradients, made: dict[int, float]) -> list[float]:
    """A step in which only these parameters, by number, have a gradient; the first number of each one's sum."""
    gradients.begin()
    for number, value in made.items():
        gradients.parameters[number].grad = torch.full_like(gradients.parameters[number], value)
        gradients.arrive(number)
    gradients.start()
    gradients.finish(0)
    return [float(gradients.own[slot.start]) for slot in gradients.layout.slots]


@pytest.mark.parametrize("kind", ["whole", "scattered"])
def test_a_parameter_without_a_gradient_adds_zeros_and_not_those_of_the_last_step(kind: str) -> None:
    spec = spec_of([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))])
    makes: dict[str, Callable[[BucketSpec], WholeGradients | ScatteredGradients]] = {
        "whole": partial(WholeGradients, to_all=True),
        "scattered": partial(ScatteredGradients, pool=BufferPool()),
    }
    gradients = makes[kind](spec)
    assert step(gradients, {0: 1.0, 1: 2.0}) == [1.0, 2.0]
    assert gradients.pop_used(0) == [True, True]
    assert step(gradients, {0: 3.0}) == [3.0, 0.0]
    assert gradients.pop_used(0) == [True, False]
    assert step(gradients, {1: 4.0}) == [0.0, 4.0]
    spec.exchange.close()


def test_of_two_steps_under_way_each_has_its_own_sum_and_its_own_flags() -> None:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
    versions = [[nn.Parameter(each.detach().clone()) for each in parameters] for _ in range(2)]
    spec = spec_of(parameters, lambda name, step: versions[step % 2][int(name)])
    gradients, found = WholeGradients(spec, to_all=True), []
    # As in a pipe that is never emptied: a step begins, and begins to be summed, before the one before it is finished.
    for step in range(5):
        gradients.begin()
        versions[step % 2][step % 2].grad = torch.full_like(parameters[step % 2], step + 1.0)
        gradients.start(step)
        if step:
            gradients.finish(step - 1)
            found.append(
                ([float(gradients.own[slot.start]) for slot in spec.layout.slots], gradients.pop_used(step - 1))
            )
            for each in versions[(step - 1) % 2]:
                each.grad = None
    assert [flags for _, flags in found] == [[True, False], [False, True]] * 2
    assert [numbers for numbers, _ in found] == [[1.0, 0.0], [0.0, 2.0], [3.0, 0.0], [0.0, 4.0]]
    assert gradients.num_bytes == 2 * spec.layout.length * 4, "two steps take turns"
    spec.exchange.close()


def spec_of(
    parameters: list[nn.Parameter], parameter_of: Callable[[str, int], nn.Parameter] | None = None
) -> BucketSpec:
    layout = FlatLayout.of([(str(number), each.shape) for number, each in enumerate(parameters)], torch.float32, 1)
    return BucketSpec(
        layout=layout, parameters=parameters, replicas=Replicas(shard=Group()), exchange=CpuExchange(),
        parameter_of=parameter_of,
    )  # fmt: skip
