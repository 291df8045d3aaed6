"""What a user's loss is of a batch: a mean over rows, over the labels that count, a sum; tried with numbers.

A plan computes it on parts of a batch, and adds up. That is the loss of the whole only if the parts are weighed by what
it is a mean over. So it is tried on three rows, on two of them and on one, in evaluation mode:

    loss of 3 = (2 * loss of 2 + 1 * loss of 1) / 3          a mean over rows: parts weigh as much as they have rows
    loss of 3 = loss of 2 + loss of 1                        a sum: parts are added, and not divided
    the first, weighed by labels that are not ignored        a mean over labels: parts weigh as much as they have labels
    none of them                                             refused

And once more with masks that hide some of the first rows, and labels that are ignored: what is a mean over rows only
while nothing is hidden is refused as well, since it would go wrong unseen with a later batch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.stages.label_counts import LabelCounts
from shardwise.stages.rows import RowRule, Seen, changed, nodes, take_rows
from shardwise.stages.split.arguments import Signature
from shardwise.stages.split.switch import undisturbed
from shardwise.stages.stage import Batch, Loss

_NUM_ROWS = 3
_FIRST = 2
_LABELS_AND_MORE = (
    "the loss is a mean over labels that are not ignored, and something else: parts of a batch that ignore some do not"
    " tell its loss"
)
_REMEDY = (
    "return the sum and the number that it is summed over: return total, number;"
    " or return loss, 1 if the mean of each part's loss is meant"
)


class LossKind(Enum):
    """What parts of a loss are weighed by; the value says it in words."""

    PAIR = "a sum and its number: parts are added up, and divided by the sum of their numbers"
    ROWS = "a mean over rows: parts weigh as much as they have rows"
    LABELS = "a mean over labels that are not ignored: parts weigh as much as they have such labels"
    EVEN = "a mean over rows and over labels: a batch with ignored labels is refused"
    ENTRY = "a mean over what an entry of the batch lets through: parts weigh as much as it adds up to in them"
    SUM = "a sum: parts are added up"
    UNTRIED = "not tried: taken for a mean, parts weigh as much as they have rows"


class Tried(NamedTuple):
    """The outcome: a kind, or what is wrong; and paths of entries that are as long as the batch, and no rows of it."""

    kind: LossKind
    problem: str | None = None
    tables: tuple[str, ...] = ()
    #: Labels of a row in the example: counts are told in rows, so that weights of even parts are 1 for each.
    labels: int = 1
    #: Whether the module computes a mean over labels itself.
    inside: bool = False
    #: The entry that lets something through, and from which token of a row on.
    entry: str = ""
    first: int = 0

    #: Whether other rows were seen to have another loss.
    depends: bool = False

    def check(self) -> None:
        if self.problem is not None:
            raise ShardwiseError(self.problem, remedy=_REMEDY)


def let_through(batch: Batch, entry: str, first: int) -> Tensor:
    """What an entry of a batch adds up to, without the first tokens of each row."""
    found = next(value for path, value in nodes(batch) if path == entry)
    return (found[..., first:] if found.dim() > 1 else found).sum(dtype=torch.float64)


def try_loss(
    module: nn.Module,
    loss: Loss,
    example: Batch,
    rule: RowRule,
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Tried:
    """Find out what a loss is, from a few rows of an example that the module can compute."""
    seen = rule.look(example)
    trial = _Trial(module, loss, precision)
    first = _outcome(trial, _three(example, seen), seen)
    if first.problem is None and first.kind is not LossKind.UNTRIED:
        return first
    # Perhaps something is as long as the batch by chance, and no part of the rows.
    for path in sorted(seen.paths):
        fewer = Seen(seen.length, seen.paths - {path})
        if fewer.paths:
            found = _outcome(trial, _three(example, fewer), fewer)
            if found.problem is None and found.depends:
                return found._replace(tables=(path,))
    return first


class _Run(NamedTuple):
    """One number of the loss, the number that it is over if it was told, and the means over labels that were seen."""

    total: float
    number: float | None
    counts: list[float]
    inside: int
    labels: int
    tolerance: float


class _Trial:
    def __init__(self, module: nn.Module, loss: Loss, precision: Callable[[], AbstractContextManager[Any]]) -> None:
        self._module, self._loss, self._precision = module, loss, precision
        self._signature = Signature(module)

    @torch.no_grad()
    def run(self, batch: Batch, ignored: float = 0.0, *, seed: int = 0) -> _Run:
        training = [each for each in self._module.modules() if each.training]
        counts = LabelCounts(ignored)
        self._module.eval()
        try:
            with undisturbed(self._module, {}), self._precision(), counts:
                torch.manual_seed(seed)
                args, kwargs = self._signature.arguments(batch)
                output = self._module(*args, **kwargs)
                inside = len(counts.found)
                result = self._loss(output, batch)
        finally:
            for each in training:
                each.training = True
        total, number = result if isinstance(result, tuple) else (result, None)
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-5}.get(total.dtype, 1e-2)
        if any(each.dtype in (torch.bfloat16, torch.float16) for each in self._module.parameters()):
            tolerance = 1e-2
        return _Run(
            float(total), None if number is None else float(number),
            [float(each.number) for each in counts.found], inside,
            max(1, counts.found[0].size // _NUM_ROWS) if counts.found else 1, tolerance,
        )  # fmt: skip


def _outcome(trial: _Trial, three: Batch, seen: Seen) -> Tried:
    two, one = _parts(three, seen)
    try:
        runs = whole, large, small = trial.run(three), trial.run(two), trial.run(one)
    except Exception:  # Whoever runs the whole example says what is wrong, if it is.
        return Tried(LossKind.UNTRIED)
    if not all(map(_is_finite, runs)):
        return Tried(LossKind.UNTRIED)
    if whole.number is not None:
        return _pair(whole, large, small)
    if not any(each.total for each in runs):
        return Tried(LossKind.UNTRIED)
    tried = Tried(
        _kind(whole, large, small), labels=whole.labels, inside=bool(whole.inside), depends=large.total != small.total
    )
    try:
        return _with_less(trial, three, seen, runs, tried)
    except Exception:  # It does not take masks that hide as much.
        return tried if tried.kind is not LossKind.UNTRIED else Tried(LossKind.ROWS, _mismatch(*runs))


def _with_less(trial: _Trial, three: Batch, seen: Seen, runs: tuple[_Run, _Run, _Run], tried: Tried) -> Tried:
    """The same once masks hide something, and labels are ignored."""
    hidden, (whole, _, small), kind = _hidden(three, seen), runs, tried.kind
    two = _parts(hidden, seen)[0]
    if kind is not LossKind.UNTRIED:
        less = trial.run(hidden, ignored=1 / _NUM_ROWS), trial.run(two, ignored=1 / _FIRST), small
        if not all(map(_is_finite, less)) or _fits(kind, *less):
            return tried
        # Is it labels or a mask?
        masked = trial.run(hidden), trial.run(two), small
        if whole.counts and kind is not LossKind.SUM and _fits(LossKind.ROWS, *masked):
            return tried._replace(kind=LossKind.EVEN)
    found = _find_mask(trial, three, seen, runs, tried)
    if found is not None:
        return found
    if kind is not LossKind.UNTRIED:
        return tried._replace(problem=_LABELS_AND_MORE)
    is_random = trial.run(three, seed=1).total != whole.total
    return Tried(LossKind.UNTRIED) if is_random else Tried(LossKind.ROWS, _mismatch(*runs))


def _kind(whole: _Run, large: _Run, small: _Run) -> LossKind:
    is_counted = len(whole.counts) == len(large.counts) == len(small.counts) == 1
    kinds = (*([LossKind.LABELS] if is_counted else []), LossKind.ROWS, LossKind.SUM)
    return next((kind for kind in kinds if _fits(kind, whole, large, small)), LossKind.UNTRIED)


def _fits(kind: LossKind, whole: _Run, large: _Run, small: _Run) -> bool:
    if kind is LossKind.SUM:
        return _fits_by(1, 1, whole._replace(total=whole.total / 2), large, small)
    by_labels = kind is LossKind.LABELS
    return _fits_by(*((large.counts[0], small.counts[0]) if by_labels else (_FIRST, 1)), whole, large, small)


def _pair(whole: _Run, large: _Run, small: _Run) -> Tried:
    """A sum and its number. The number may be anything that is meant, 1 say; a mean beside one that adds up is none."""
    assert whole.number is not None and large.number is not None and small.number is not None
    adds_up = abs(whole.number - large.number - small.number) <= whole.tolerance * abs(whole.number)
    is_sum = _fits(LossKind.SUM, whole, large, small)
    if not adds_up or is_sum or not whole.number:
        return Tried(LossKind.PAIR)
    # Something else than a sum may be meant, of all replicas together; a mean, or one over labels, is not.
    if not whole.counts and not _fits_by(large.number, small.number, whole, large, small):
        return Tried(LossKind.PAIR)
    return Tried(
        LossKind.PAIR,
        f"the loss is a pair of {whole.total:.6g} and {whole.number:g} for {_NUM_ROWS} rows, but the first is a mean and"
        f" no sum: for {_FIRST} and 1 of them it is {large.total:.6g} and {small.total:.6g}",
    )


def _mismatch(whole: _Run, large: _Run, small: _Run) -> str:
    return (
        f"the loss of {_NUM_ROWS} rows is {whole.total:.6g}, of {_FIRST} of them {large.total:.6g} and of the other"
        f" {small.total:.6g}: it is neither their mean by rows nor their sum, so parts of a batch do not tell its loss"
    )


def _find_mask(
    trial: _Trial, three: Batch, seen: Seen, runs: tuple[_Run, _Run, _Run], tried: Tried
) -> Tried | None:
    """Which entry the loss is a mean over: parts are weighed by it, if that tells the loss of the whole."""
    small = runs[2]
    for path in sorted(seen.paths):
        hidden = _hidden(three, seen, path)
        if hidden is three:
            continue
        two = _parts(hidden, seen)[0]
        less = whole, large, _ = trial.run(hidden), trial.run(two), small
        if not all(map(_is_finite, less)):
            continue
        if tried.kind is not LossKind.UNTRIED and _fits(tried.kind, *less):
            continue
        for first in (0, 1):
            weights = [_weights(each, seen, path, first) for each in (three, hidden)]
            if _fits_by(*weights[0], *runs) and _fits_by(*weights[1], *less):
                size = max(1, _size_of(three, path) // _NUM_ROWS)
                return tried._replace(kind=LossKind.ENTRY, labels=size, entry=path, first=first)
        if tried.kind is not LossKind.UNTRIED:
            return Tried(
                tried.kind,
                f"the loss is a mean over what {path} lets through: with half of {_FIRST} rows hidden in it, the loss"
                f" of {_NUM_ROWS} rows is {whole.total:.6g}, and not the mean of {large.total:.6g} and"
                f" {small.total:.6g} by rows",
            )
    return None


def _weights(three: Batch, seen: Seen, path: str, first: int) -> tuple[float, float]:
    large, small = (float(let_through(each, path, first)) for each in _parts(three, seen))
    return large, small


def _fits_by(weight: float, other: float, whole: _Run, large: _Run, small: _Run) -> bool:
    if not weight + other:
        return False
    wanted = (weight * large.total + other * small.total) / (weight + other)
    return abs(whole.total - wanted) <= whole.tolerance * max(abs(each.total) for each in (whole, large, small))


def _size_of(batch: Batch, path: str) -> int:
    return next(int(value.numel()) for here, value in nodes(batch) if here == path)


def _is_finite(run: _Run) -> bool:
    return abs(run.total) < float("inf")


def _three(example: Batch, seen: Seen) -> Batch:
    """Three rows of an example, the last again if there are fewer."""
    places = [min(number, seen.length - 1) for number in range(_NUM_ROWS)]

    def take(path: str, value: Any) -> Any:
        if path not in seen.paths:
            return None
        if isinstance(value, Tensor):
            return value[torch.tensor(places, device=value.device)]
        return type(value)(value[each] for each in places) if isinstance(value, (list, tuple)) else value[places]

    plain = take_rows(example, seen, 0, seen.length)
    return changed(plain, take)  # type: ignore[no-any-return]


def _parts(three: Batch, seen: Seen) -> tuple[Batch, Batch]:
    return take_rows(three, seen, 0, _FIRST), take_rows(three, seen, _FIRST, _NUM_ROWS)


def _hidden(three: Batch, seen: Seen, only: str | None = None) -> Batch:
    """The same with masks and weights that let less of the first two rows through."""

    def hide(path: str, value: Any) -> Any:
        if path not in seen.paths or not isinstance(value, Tensor) or (only is not None and path != only):
            return None
        is_mask = value.dtype is torch.bool or bool(((value == 0) | (value == 1)).all())
        if not is_mask and not value.is_floating_point():
            return None
        made = value.clone()
        if is_mask and value.dim() > 1:
            made[:_FIRST, ..., (value.shape[-1] + 1) // 2 :] = 0
        else:
            made[0] = made[0] * 0 if is_mask else made[0] * 0.25
        return made

    return changed(three, hide)  # type: ignore[no-any-return]


