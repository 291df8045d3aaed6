"""An asynchronous all-to-all: rows travel while something else is computed, in the forward and in the backward.

    forward     start ─ meanwhile ─ wait          the rows travel from `start` to `wait`,
    backward    start ─ meanwhile ─ wait          and their gradients from `wait` to `start`

Autograd goes back through what is ready in the reverse order of the forward, so what was computed meanwhile goes back
meanwhile. What ties `wait` to `start` in its graph is a tensor without numbers.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from shardwise.ranks.collectives import Group, Pending, start_all_to_all


class AsyncAllToAll:
    """Rows for every rank against rows from every rank. They are under way when it is made."""

    def __init__(self, rows: Tensor, group: Group, sent: Sequence[int], received: Sequence[int]) -> None:
        self.group, self.sent, self.received = group, sent, received
        self.out: Pending | None = None
        self.back: Pending | None = None
        self._link: Tensor = _Start.apply(rows, self)  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        """The rows that have arrived."""
        return _Wait.apply(self._link, self)  # type: ignore[no-untyped-call, no-any-return]


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: AsyncAllToAll) -> Tensor:
        ctx.transfer = transfer
        transfer.out = start_all_to_all(rows, transfer.group, transfer.sent, transfer.received)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, link: Tensor) -> tuple[Tensor, None]:
        del link
        pending, ctx.transfer.back = ctx.transfer.back, None
        assert pending is not None, "gradients are sent back before they are waited for"
        return pending.finish(), None


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, link: Tensor, transfer: AsyncAllToAll) -> Tensor:
        del link
        ctx.transfer = transfer
        pending, transfer.out = transfer.out, None
        assert pending is not None, "rows are waited for once"
        return pending.finish()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        transfer = ctx.transfer
        transfer.back = start_all_to_all(gradient, transfer.group, transfer.received, transfer.sent)
        return gradient.new_empty(0), None
