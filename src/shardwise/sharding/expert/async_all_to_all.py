"""Rows on their way to other ranks, while something else is computed: in the forward and in the backward.

    forward     depart ─ meanwhile ─ land          the rows are under way from `depart` to `land`,
    backward    depart ─ meanwhile ─ land          and their gradients from `land` to `depart`

Autograd goes back through what is ready in the reverse order of the forward, so what was computed meanwhile goes back
meanwhile. What ties `land` to `depart` in its graph is a tensor without numbers.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from shardwise.ranks.collectives import Group, Pending, start_all_to_all


class Flight:
    """Rows for every rank against rows from every rank. They are under way when it is made."""

    def __init__(self, rows: Tensor, group: Group, sent: Sequence[int], received: Sequence[int]) -> None:
        self.group, self.sent, self.received = group, sent, received
        self.out: Pending | None = None
        self.back: Pending | None = None
        self._link: Tensor = _Depart.apply(rows, self)  # type: ignore[no-untyped-call]

    def land(self) -> Tensor:
        """The rows that have arrived."""
        return _Land.apply(self._link, self)  # type: ignore[no-untyped-call, no-any-return]


class _Depart(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        flight.out = start_all_to_all(rows, flight.group, flight.sent, flight.received)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, link: Tensor) -> tuple[Tensor, None]:
        del link
        pending, ctx.flight.back = ctx.flight.back, None
        assert pending is not None, "gradients are sent back before they are waited for"
        return pending.finish(), None


class _Land(Function):
    @staticmethod
    def forward(ctx: Any, link: Tensor, flight: Flight) -> Tensor:
        del link
        ctx.flight = flight
        pending, flight.out = flight.out, None
        assert pending is not None, "rows land once"
        return pending.finish()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        flight = ctx.flight
        flight.back = start_all_to_all(gradient, flight.group, flight.received, flight.sent)
        return gradient.new_empty(0), None
