"""Two versions of the weights, for a pipeline that is never emptied between steps (PipeDream-2BW).

Batch t is computed with W(t-1) from its first forward to its last backward, while batch t+1 has already begun with
W(t). So there are two sets of tensors, and batch t uses set t % 2:

    batch       0      1      2      3
    uses        W(0)   W(0)   W(1)   W(2)
    set         0      1      0      1

When batch t has gone back, its set is free. It becomes W(t+1): it takes over W(t) from the other set and the optimizer
steps on it with the batch's gradients, so that W(t+1) = W(t) - lr * g(W(t-1)). The module's own parameters are what the
optimizer knows. They share the memory of the newest version and are never part of a graph.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from shardwise.torch_private import parameter_slots


class _Spot(NamedTuple):
    """Where a module keeps a parameter."""

    owner: nn.Module
    attribute: str
    name: str


class WeightStash:
    """The versions of the parameters of one rank, which are trained; by their names in the module."""

    def __init__(self, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        #: The memory that parameters had: there the newest must be when others look at it.
        self._homes = {name: each.data for name, each in parameters.items()}
        # Through `data`: what the optimizer writes to a parameter must not count as written to what shares its memory.
        self._sets = [
            {name: nn.Parameter(each.data.clone()) for name, each in parameters.items()},
            {name: nn.Parameter(each.data) for name, each in parameters.items()},
        ]
        names = {id(each): name for name, each in parameters.items()}
        self._spots = [
            _Spot(owner, attribute, names[id(each)])
            for owner in module.modules()
            for attribute, each in parameter_slots(owner).items()
            if each is not None and id(each) in names
        ]

    def of(self, name: str, batch: int) -> nn.Parameter:
        """What a batch uses as this parameter, and adds its gradients to."""
        return self._sets[batch % 2][name]

    def select(self, batch: int) -> None:
        """Let the module compute with the weights of a batch."""
        chosen = self._sets[batch % 2]
        for owner, attribute, name in self._spots:
            parameter_slots(owner)[attribute] = chosen[name]

    def rest(self) -> None:
        """Let the module have its own parameters again, the newest."""
        for owner, attribute, name in self._spots:
            parameter_slots(owner)[attribute] = self._parameters[name]

    @torch.no_grad()
    def settle(self) -> None:
        """The pipe is empty: have the newest weights in the memory that parameters had. The two sets change places."""
        for name, parameter in self._parameters.items():
            home = self._homes[name]
            if parameter.data_ptr() == home.data_ptr():
                continue
            newest, older = sorted(
                (each[name] for each in self._sets), key=lambda each: each.data_ptr() == home.data_ptr()
            )
            away, numbers = newest.data, newest.data.clone()
            away.copy_(home)
            home.copy_(numbers)
            newest.data, older.data, parameter.data = home, away, home

    @torch.no_grad()
    def prepare(self, batch: int) -> None:
        """Make the optimizer's next step that of a batch: on the newest weights, with the batch's gradients."""
        done, newest = self._sets[batch % 2], self._sets[(batch + 1) % 2]
        for name, parameter in self._parameters.items():
            done[name].copy_(newest[name])
            parameter.data = done[name].data
            parameter.grad, done[name].grad = done[name].grad, None
