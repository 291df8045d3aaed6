"""The kinds of user losses, which determine how parts of a batch are weighted. `loss_trial.py` finds the kind."""

import math
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.stages.rows import nodes
from shardwise.stages.stage import Batch

#: What to write if the losses of parts do not determine that of the batch.
REMEDY = (
    "return the sum and the number that it is summed over: return total, number;"
    " or return loss, 1 if the mean of each part's loss is meant"
)
#: The same where the loss may be several means. Sums that are divided by numbers of the whole batch are added.
REMEDY_OF_MEANS = (
    "return the sum and the number that it is summed over: return total, number; of several means their sums, each"
    " divided by its number in the whole batch (of all replicas), which the script puts there:"
    " batch['num_labels'] = (batch['labels'] != -100).sum(), and"
    " return total / batch['num_labels'] + other / batch['num_rows'];"
    " or return loss, 1 if the mean of each part's loss is meant"
)
#: For a pair whose number is computed from the module's output.
LEARNED_NUMBER = (
    "the number that the loss is summed over has a gradient itself, as it is computed with parameters, and the sum over"
    " all parts of a batch is divided by it only when all backwards are over"
)
#: For a pair whose sum does not add up.
REMEDY_OF_PARTS = (
    "rows that are computed each by itself; a number that the module returns beside them; or return total / number, 1"
    " if each part of a batch by itself is meant"
)
OWN_BACKWARD = (
    "the forward or the loss calls backward() itself, and leaves gradients that belong to no part of a batch: they"
    " would be added once for each part, and not weighed as its loss is"
)
REMEDY_OF_OWN = "return the sum of both losses; or torch.autograd.grad, which leaves nothing in parameters"
REMEDY_OF_BENT = (
    "hooks and functions whose gradient is a multiple of the one they are given; clip= to clip gradients; or a plan"
    " without dp, cp and microbatches"
)
#: Of a loss that draws from other generators than torch's in evaluation mode too.
DRAWN = ": each draws other numbers from Python's or NumPy's generators"
REMEDY_OF_DRAWN = (
    "numbers that are drawn for each row by torch (torch.randint, torch.randn), which are tried with the same ones for"
    " each row; or as an entry of the batch; or return total, number"
)
REMEDY_OF_LEARNED = "number.detach(), if it is not to be learned; or a plan without dp, cp and microbatches"


class LossKind(Enum):
    """How the losses of parts are weighted. The value is a description."""

    PAIR = "a sum and its number: parts are added up, and divided by the sum of their numbers"
    BESIDE = (
        "a sum and its number, with numbers that the module returns beside its rows (a balancing loss): parts are added"
        " up, each with the number of its own rows"
    )
    ROWS = "a mean over rows: parts weigh as much as they have rows"
    LABELS = "a mean over labels that are not ignored: parts weigh as much as they have such labels"
    ENTRY = "a mean over what an entry of the batch lets through: parts weigh as much as that is in them"
    EVEN = "a mean over rows and over labels: a batch with ignored labels is refused"
    SUM = "a sum: parts are added up"
    UNTRIED = "taken for a mean over rows: it could not be tried, or nothing is cut"


class Through(NamedTuple):
    """The weight that an entry gives: its sum, or its count of numbers other than `hidden`, from the `first` token on.

    `hidden` is an integer for integer entries, and NaN for others. `plus`: the loss adds this to what it divides by
    (`mask.sum() + 1e-6`).
    """

    path: str
    first: int = 0
    hidden: float | None = None
    #: The weight of one row of the example.
    row: int = 1
    plus: float = 0.0
    #: Whether it counts integers from 0 on: `labels >= 0`.
    from_0: bool = False
    #: The least fraction that it was seen to fit: None for any, 0 if none is negative, 1 if it has to be a mask.
    least: float | None = None

    def of(self, batch: Batch) -> Tensor:
        """Return the weight of a part. Does not synchronise."""
        found = self._entry(batch)
        if self.hidden is not None:
            shown = found >= 0 if self.from_0 else found != self.hidden
            found = ~found.isnan() if math.isnan(self.hidden) else shown
        made: Tensor = found.sum(dtype=torch.float64)
        return made

    def check(self, batch: Batch) -> None:
        """Refuse a batch with weights that the loss is no mean by. Reads numbers: not while a step is under way."""
        if self.least is None:
            return
        found = self._entry(batch)
        if bool(((found < self.least) & (found != 0)).any()):
            what = "numbers below 1 other than 0" if self.least else "negative numbers"
            raise ShardwiseError(
                f"{self.path} has {what} here, and the loss is a mean by it only as long as it has none: parts of this"
                " batch do not tell its loss",
                remedy=REMEDY_OF_MEANS,
            )

    def _entry(self, batch: Batch) -> Tensor:
        found = next((value for path, value in nodes(batch) if path == self.path), None)
        if found is None:
            raise ShardwiseError(
                f"parts of a batch weigh as much as {self.path} lets through, and this batch has no {self.path}",
                remedy=f"{self.path} in every batch, ones where nothing is hidden; or return total, number",
            )
        made: Tensor = found[..., self.first :] if found.dim() > 1 else found
        return made


def throughs(path: str, value: float | None, entry: Tensor, num_rows: int) -> list[Through]:
    """Return the weights that an entry may give, if hiding `value` in it changes what a mean is over."""
    if isinstance(value, float) and not math.isnan(value):
        return []
    row = max(1, entry.numel() // num_rows)
    found = [Through(path, first, value, row) for first in (0, 1)]
    if value is not None and value < 0 and not entry.is_floating_point():
        found += [each._replace(from_0=True) for each in found]
    if value == 0 and entry.dim() == 1 and not entry.is_floating_point() and bool((entry >= 0).all()):
        # Lengths, of which the loss makes a mask.
        found.append(Through(path, row=max(1, int(entry.max()))))
    return found


class Tried(NamedTuple):
    """The outcome: a kind, or a problem; and `tables`, paths of entries as long as the batch that are not its rows."""

    kind: LossKind
    problem: str | None = None
    tables: tuple[str, ...] = ()
    #: Labels per row in the example: counts are converted to rows, so that equal parts have a weight of 1 per row.
    labels: int = 1
    #: Whether the module computes a mean over labels itself.
    inside: bool = False
    through: Through | None = None
    #: Whether it computes a mean over labels for each row, so that more rows have more of them.
    of_rows: bool = False
    #: Whether other rows were seen to give another loss.
    depends: bool = False
    #: Whether module or loss failed on parts of the example.
    failed: bool = False
    remedy: str = REMEDY
    #: Whether the mean of each part's loss is intended: `return loss, 1`.
    apart: bool = False
    #: The line that branches on a value over all rows, if there is one.
    decides: str | None = None
    #: What forwards leave for the next one, if this changes its loss.
    carried: str | None = None
    #: Whether a forward in training mode was seen to write to no buffer.
    writes_none: bool = False
    #: Under cp, what a loss is over whole sequences, if it has to be a pair: for the refusal.
    of_whole: "Tried | None" = None

    def check(self) -> None:
        if self.problem is not None:
            raise ShardwiseError(self.problem, remedy=self.remedy)
