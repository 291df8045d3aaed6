"""Find the entry of a batch that a loss is a mean over: a mask, weights, lengths, or labels that are not ignored."""

from collections.abc import Iterator, Sequence
from itertools import chain
from math import inf
from typing import Any

import torch

from shardwise.stages.index_check import IndexCheck
from shardwise.stages.loss_kind import REMEDY_OF_MEANS, LossKind, Through, Tried, throughs
from shardwise.stages.loss_parts import fits, fits_by
from shardwise.stages.rows import Seen, changed, nodes, tensors_in
from shardwise.stages.spread_outputs import WAYS, spread
from shardwise.stages.stage import Batch
from shardwise.stages.trial_rows import (
    FIRST,
    MARKS,
    NUM_ROWS,
    UNKNOWN,
    fractions_of,
    integers_of,
    two_and_one,
    ways_to_hide,
    with_hidden,
    words_of,
)
from shardwise.stages.trial_run import Runs, Trial

#: Other ways to hide parts of an entry: in one row only, the first token, every second token.
_OTHER_WAYS: tuple[dict[str, Any], ...] = ({"rows": 1}, {"tokens": slice(0, 1)}, {"tokens": slice(None, None, 2)})


def find_entry(trial: Trial, three: Batch, seen: Seen, runs: Runs, tried: Tried) -> Tried | None:
    """Find the entry that the loss is a mean over: weighted by it, parts have to give the loss of the whole."""
    for path, value in ways_to_hide(three, seen, trial.numbers):
        hidden = with_hidden(three, seen, value, path)
        again = (value in (None, 0) and not isinstance(value, float)) or are_inside(trial, path, value, runs)
        less = trial.less(hidden, seen, runs, again=again, within=IndexCheck)
        if less is None or (tried.kind is not LossKind.UNTRIED and fits(tried.kind, *less)):
            continue
        if less[0].counts != runs[0].counts and tried.kind is not LossKind.UNTRIED:
            continue  # Torch's mean over labels ignores these, and its labels are counted in every batch.
        for through in throughs(path, value, next(each for here, each in nodes(three) if here == path), NUM_ROWS):
            cases = chain([(three, runs), (hidden, less)], _other_cases(trial, three, seen, runs, path, value, again))
            through = through._replace(plus=_added(through, hidden, seen, less))
            if all(each is None or fits_through(through, batch, seen, each) for batch, each in cases):
                return tried._replace(kind=LossKind.ENTRY, through=_bounded(trial, three, seen, runs, through))
        if tried.kind is not LossKind.UNTRIED:
            whole, large, small = (each.total for each in less)
            return tried._replace(
                problem=f"the loss is divided by something that {path} decides: with {value or 0} for some of it in"
                f" {FIRST} rows, the loss of {NUM_ROWS} rows is {whole:.6g}, and not the mean of {large:.6g} and"
                f" {small:.6g} by rows, so parts of a batch do not tell its loss",
                remedy=REMEDY_OF_MEANS,
            )
    return None


def _bounded(trial: Trial, three: Batch, seen: Seen, runs: Runs, through: Through) -> Through:
    """Return the weight with what it was seen to fit: any fractions, those that are not negative, or masks alone."""
    entry = next(each for here, each in nodes(three) if here == through.path)
    if through.hidden is not None or not entry.is_floating_point():
        return through

    def fits_with(*factors: float) -> bool:
        def scale(path: str, given: Any) -> Any:
            by = torch.tensor(factors, dtype=given.dtype, device=given.device) if path == through.path else None
            return None if by is None else given * by.view(-1, *[1] * (given.dim() - 1))

        scaled = changed(three, scale)
        less = trial.less(scaled, seen, runs, again=trial.takes(through.path))
        return less is not None and fits_through(through, scaled, seen, less)

    least = None if fits_with(-0.5, 0.25, 1.0) else 0.0 if fits_with(0.5, 0.25, 1.0) else 1.0
    return through._replace(least=least)


def with_numbers(trial: Trial, three: Batch, seen: Seen, runs: Runs) -> Iterator[Runs | None]:
    """Yield runs in which some of an entry is a number that the code of the loss has: padding, a void class."""
    for path, value in ways_to_hide(three, seen, trial.numbers):
        if value is not None and value not in (*MARKS, *UNKNOWN):
            yield trial.less(with_hidden(three, seen, value, path), seen, runs, again=False)


def _other_cases(
    trial: Trial, three: Batch, seen: Seen, runs: Runs, path: str, value: float | None, again: bool
) -> Iterator[tuple[Batch, Runs | None]]:
    """Yield what weights by an entry must fit as well, each when it is asked for: most do not fit the first ones."""
    # With few tokens, weights may fit by chance, so the entry is hidden in other ways too.
    for how in _OTHER_WAYS:
        other = with_hidden(three, seen, value, path, **how)
        yield other, trial.less(other, seen, runs, again=again, within=IndexCheck)
    # Other numbers must not change the weights: a loss may leave out every fifth class.
    words = [with_hidden(three, seen, each, path) for each in _other_numbers(trial, three, path, value)]
    # Another entry may decide as well: a mask, and labels that are ignored.
    beside = [with_hidden(three, seen, each, name) for name, each in ways_to_hide(three, seen) if name != path]
    for other in (*words, *beside):
        yield other, trial.less(other, seen, runs, again=False)


def count_the_same(trial: Trial, three: Batch, seen: Seen, runs: Runs, tried: Tried) -> bool:
    """Whether all terms of a loss leave out the labels that torch's mean ignores, as a term of `logits[labels != -100]`
    does: parts weighted by the labels that are counted give the whole, however an entry marks labels as ignored."""
    if tried.kind is not LossKind.LABELS:
        return False
    ways = list(ways_to_hide(three, seen))
    for path, value in ways:
        if str(value) not in map(str, MARKS):  # A float marks an unknown target, and no label.
            continue
        again, hidden = are_inside(trial, path, value, runs), with_hidden(three, seen, value, path)
        less = trial.less(hidden, seen, runs, again=again, within=IndexCheck)
        if less is None or less[0].counts == runs[0].counts or not fits(tried.kind, *less):
            continue
        if not all(_fits_apart(trial, hidden, seen, runs, tried, factors) for factors in WAYS):
            return False
        others = [with_hidden(three, seen, value, path, **how) for how in _OTHER_WAYS]
        # Other entries and other integers must not change what is counted.
        others += [with_hidden(hidden, seen, each, name) for name, each in ways if name != path]
        others += [with_hidden(three, seen, each, path) for each in (0, *words_of(three, path))]
        tried_on = [trial.less(each, seen, runs, again=again, within=IndexCheck) for each in others]
        return all(each is None or fits(tried.kind, *each) for each in tried_on)
    return False


def _fits_apart(trial: Trial, hidden: Batch, seen: Seen, runs: Runs, tried: Tried, factors: tuple[float, ...]) -> bool:
    """Whether parts give the whole also with outputs scaled apart: a term that is the same for all rows fits always."""
    outputs = spread((runs[0].output, runs[1].output, runs[2].output), factors)
    if outputs is None:
        return False
    whole, large, small = (run._replace(output=each) for run, each in zip(runs, outputs, strict=True))
    found = trial.less(hidden, seen, (whole, large, small), again=False)
    return found is not None and fits(tried.kind, *found)


def fits_through(through: Through, three: Batch, seen: Seen, runs: Runs) -> bool:
    """Whether parts give the whole if they are weighted by what an entry lets through."""
    weight, other = _weights_of(through, three, seen)
    return fits_by(weight + through.plus, other + through.plus, *runs, over=weight + other + through.plus)


def _added(through: Through, hidden: Batch, seen: Seen, less: Runs) -> float:
    """Return what a loss adds to the number that it divides by: 0, or what is left over of these runs.

    If it is (a + b) / (m + n + c) for the whole, and a / (m + c) and b / (n + c) for the parts, c is known."""
    if fits_through(through, hidden, seen, less):
        return 0.0
    whole, large, small = (each.total for each in less)
    weight, other = _weights_of(through, hidden, seen)
    missing = whole - large - small
    # Rounded: trials of other numbers are to find the same.
    found = float(f"{(large * weight + small * other - whole * (weight + other)) / missing:.4g}") if missing else 0.0
    return found if 0 < found < inf else 0.0


def _weights_of(through: Through, three: Batch, seen: Seen) -> tuple[float, float]:
    two, one = two_and_one(three, seen)
    return float(through.of(two)), float(through.of(one))


def are_inside(trial: Trial, path: str, value: float | None, runs: Runs) -> bool:
    """Whether labels to ignore, or unknown targets, are given to the module, which may compute a loss of them."""
    if value is None or not trial.takes(path):
        return False
    return value in MARKS if isinstance(value, int) else computes_loss(runs)


def computes_loss(runs: Runs) -> bool:
    """Whether the module returns a number, and not only rows."""
    return any(not each.dim() and each.is_floating_point() for each in tensors_in({"": runs[0].output}))


def _other_numbers(trial: Trial, three: Batch, path: str, value: float | None) -> Sequence[float]:
    """Return other numbers than the one that an entry hides, those of the loss among them."""
    if value is None:
        return []
    marks = MARKS if value in MARKS else words_of(three, path)
    integers = sorted({*marks, *integers_of(trial.numbers)} - {value})
    fractions = [each for each in (*UNKNOWN, *fractions_of(trial.numbers)) if str(each) != str(value)]  # As to NaN.
    return fractions if type(value) is float else integers
