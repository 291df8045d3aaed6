"""The gradients of parameters that one replica alone has: each stays where autograd has put it.

Nothing is summed over replicas, so nothing is moved into a run of memory either. What tied stages on several ranks
share is summed tensor by tensor, begun as soon as a rank has its part.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from shardwise.ranks.collectives import Group
from shardwise.ranks.exchange import Exchange, Ticket
from shardwise.ranks.mesh import Replicas
from shardwise.states.buckets.flat_layout import FlatLayout
from shardwise.states.buckets.gradients import Gradients
from shardwise.torch_private import foreach_scale


class LocalGradients(Gradients):
    """`parameter_of(name, step)` is what a step's gradients are added to, if not to the module's own parameters.

    Then they are moved to those before the step is taken (`execution/weight_stash.py`), and are theirs from then on.
    """

    def __init__(
        self,
        layout: FlatLayout,
        parameters: list[nn.Parameter],
        replicas: Replicas,
        exchange: Exchange,
        channel: int,
        *,
        parameter_of: Callable[[str, int], nn.Parameter] | None = None,
    ) -> None:
        super().__init__(layout, parameters, replicas, exchange, channel)
        self._parameter_of = parameter_of
        #: Whether each parameter had a gradient, by step: two may be under way.
        self._used: dict[int, list[bool]] = {}
        self._sums: dict[int, list[Ticket]] = {}

    def begin(self) -> None:
        super().begin()
        if self._parameter_of is None:  # Else another step is under way.
            self._used.clear()
            self._sums.clear()

    def start(self, step: int = 0) -> None:
        """All gradients of a step have been added."""
        if step not in self._used:
            self._used[step] = [each.grad is not None for each in self._targets(step)]

    @torch.no_grad()
    def start_sum(self, group: Group, step: int) -> None:
        """Begin to sum them over the stages of a tie. A rank that used one nowhere still takes part in its sum.

        So each counts as used: to ask the others would be another message, in an order that two steps under way at a
        time do not share.
        """
        if step in self._sums:
            return
        self._used[step] = [True] * len(self.parameters)
        tickets = []
        for number, each in enumerate(self._targets(step)):
            if each.grad is None:
                each.grad = torch.zeros_like(each)
            tickets.append(self._exchange.sum_to_all(each.grad, group, self._channel + number))
        self._sums[step] = tickets

    def finish(self, step: int) -> None:
        """Let the sums of a step be the result."""
        for ticket in self._sums.pop(step, ()):
            ticket.wait()
        self.used = self._used.pop(step)

    def find(self, number: int) -> Tensor | None:
        """The gradient of a parameter, if it has one."""
        return self.parameters[number].grad

    @property
    def num_bytes(self) -> int:
        return sum(each.grad.nbytes for each in self.parameters if each.grad is not None)

    def _targets(self, step: int) -> list[nn.Parameter]:
        if self._parameter_of is None:
            return self.parameters
        return [self._parameter_of(slot.name, step) for slot in self.layout.slots]


def scale_all(every: Iterable[LocalGradients], factor: float) -> None:
    """Multiply gradients, all of them at once."""
    found = [each.grad for local in every for each in local.parameters if each.grad is not None]
    if factor != 1.0 and found:
        foreach_scale(found, factor)
