"""The gradients of a bucket from step to step: of one that has none there is nothing left of the step before."""

import pytest
import torch
from torch import nn

from shardwise.ranks.collectives import Group
from shardwise.ranks.cpu_exchange import CpuExchange
from shardwise.ranks.exchange import BufferPool
from shardwise.ranks.mesh import Replicas
from shardwise.states.buckets.flat_layout import FlatLayout
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
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))]
    layout = FlatLayout.of([(str(number), each.shape) for number, each in enumerate(parameters)], torch.float32, 1)
    replicas, exchange = Replicas(shard=Group()), CpuExchange()
    gradients: WholeGradients | ScatteredGradients
    if kind == "whole":
        gradients = WholeGradients(layout, parameters, replicas, exchange, 0, to_all=True)
    else:
        gradients = ScatteredGradients(layout, parameters, replicas, exchange, 0, pool=BufferPool())
    assert step(gradients, {0: 1.0, 1: 2.0}) == [1.0, 2.0]
    assert gradients.used == [True, True]
    assert step(gradients, {0: 3.0}) == [3.0, 0.0]
    assert gradients.used == [True, False]
    assert step(gradients, {1: 4.0}) == [0.0, 4.0]
    exchange.close()
