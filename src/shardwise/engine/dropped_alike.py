"""Let the copy of a module that computes whole steps drop what the ranks drop (`first_steps.py`).

Masks are the same under every plan as long as a dropout is given the rows of its microbatch one after the other. Some
are given something else: a weight matrix, rows that the forward has joined twice, tokens before rows. There each part
of a batch draws masks of its own, as replicas do in plain torch too, and a difference says nothing.
"""

from typing import Self

import torch
from torch import Tensor, nn

from shardwise.engine.parts import Parts
from shardwise.planner.plan import Plan
from shardwise.sharding.dropout import Dropouts, Place, num_tokens_of
from shardwise.stages.rows import RowRule, take_rows
from shardwise.stages.stage import Batch
from shardwise.stages.whole_copy import WholeCopy

#: How far the inputs of a dropout may differ between parts and the whole, relative to the largest: rounding.
_NEAR = 1e-3


class DropAlike:
    """The masks of one copy. It is called before a forward with the batch and the number of the step."""

    def __init__(self, dropouts: Dropouts, rule: RowRule, plan: Plan) -> None:
        self._dropouts, self._rule = dropouts, rule
        #: Whether ranks hold parts of a row: which part a dropout was given is not known for every shape.
        self._cuts_rows = plan.tp * plan.cp > 1
        #: The rows of the next forward; None for the whole batch.
        self._rows: range | None = None

    @classmethod
    def attached(cls, copy: nn.Module, parts: Parts) -> Self | None:
        """Attach to a copy; None if it has no dropout."""
        dropouts = Dropouts(seed=parts.options.seed)
        return cls(dropouts, parts.rule, parts.plan) if dropouts.attach(copy, parts.callers) else None

    def __call__(self, batch: Batch, number: int) -> None:
        rows = range(self._rule.length(batch)) if self._rows is None else self._rows
        place = Place(step=number, first_row=rows.start, num_rows=len(rows), num_tokens=num_tokens_of(batch))
        self._dropouts.stand(place)

    def are_by_rows(self, copy: WholeCopy, batch: Batch, number: int) -> bool:
        """Whether every dropout gets the rows of the batch in order, so that parts must drop what the whole drops: in
        two halves their inputs are those of the whole."""
        half = self._rule.length(batch) // 2
        if self._cuts_rows or not half:
            return False
        try:
            seen = self._rule.look(batch)
            parts = [range(half), range(half, seen.length)]
            whole = self._inputs(copy, batch, number, range(seen.length))
            halves = [self._inputs(copy, take_rows(batch, seen, each.start, each.stop), number, each) for each in parts]
        except Exception:  # What cannot be cut is not compared.
            return False
        if not len(whole) == len(halves[0]) == len(halves[1]):
            return False
        return all(_are_joined(*each) for each in zip(whole, *halves, strict=True))

    def _inputs(self, copy: WholeCopy, batch: Batch, number: int, rows: range) -> list[Tensor]:
        found: list[Tensor] = []
        self._rows, self._dropouts.watch = rows, lambda given: found.append(given.detach().clone())
        try:
            copy.step(batch, number)
        finally:
            self._rows = self._dropouts.watch = None
        return found


def _are_joined(whole: Tensor, first: Tensor, second: Tensor) -> bool:
    if first.shape[1:] != second.shape[1:] or len(whole) != len(first) + len(second):
        return False
    joined = torch.cat([first, second])
    if whole.shape != joined.shape or not whole.numel():
        return whole.shape == joined.shape
    return bool((whole - joined).abs().max() <= _NEAR * whole.abs().max())
