"""Test the gradients of a loss too: `loss / loss.detach()` is 1 for any rows, and its gradient is not their mean.

Values alone do not show what a loss makes constant for autograd with `detach()` or `item()`. So if the values of parts
combine to that of the whole, their gradients have to as well. Gradients are not compared one by one, as it is unknown
where the rows of an output are. Instead they are multiplied by numbers from the outputs and summed, which gives one
number per run, a slope. The slopes of parts have to combine to that of the whole, as their losses do.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.stages.rows import changed, tensors_in
from shardwise.stages.stage import Batch
from shardwise.stages.trial_rows import FIRST, NUM_ROWS
from shardwise.stages.trial_run import Run, Runs, Trial

#: The difference, relative to the largest number, up to which numbers count as equal; and which share is "most".
_NEAR, _MOST = 0.05, 0.75
#: Gradients that are smaller than this share of the tolerance are rounding, of a loss that is 0 (two equal models).
_NOTHING = 0.1
#: The factor on the tolerance for gradients of parameters, which are sums of many more numbers than a loss is.
_SLACK = 100.0


class _Slopes(NamedTuple):
    """The slopes of one run: along its outputs, and along their cosines; and the sum of magnitudes."""

    along: float
    across: float
    size: float
    run: Run


def slopes_of(trial: Trial, batches: Sequence[Batch], runs: Runs) -> list[Runs]:
    """Return three runs with slopes in place of totals, twice. In each, parts have to combine to the whole.

    Only outputs with rows as their first dim are used: a scalar over all rows (a balancing loss) combines otherwise.
    Parts get the outputs of the whole, as a forward of fewer rows may round differently, unless their rows are
    elsewhere in it (all first crops, then all second crops).
    """
    numbers = [_numbers_in(each.output) for each in runs]
    have_rows = [_has_rows(*each) for each in zip(*numbers, strict=True)]
    for whole, large, small, has_rows in zip(*numbers, have_rows, strict=True):
        parts = whole.detach().split([len(large), len(small)]) if has_rows else None
        if parts is not None and (len(whole) == NUM_ROWS or all(map(_is_mostly, parts, (large, small)))):
            large.data, small.data = parts
    found = [
        _slopes(trial, batch, run, list(zip(mine, have_rows, strict=True)))
        for batch, run, mine in zip(batches, runs, numbers, strict=True)
    ]
    made: list[Runs] = []
    size = max(each.size for each in found)
    for totals in ([each.along for each in found], [each.across for each in found]):
        largest = max(map(abs, totals))
        if largest > 0 and _NOTHING * runs[0].tolerance < size < float("inf"):
            # Rounding is relative to the magnitudes summed, much of which may have cancelled.
            whole, large, small = (
                each.run._replace(total=total, tolerance=each.run.tolerance * size / largest)
                for each, total in zip(found, totals, strict=True)
            )
            made.append((whole, large, small))
    return made


def by_parameters(runs: Runs) -> Iterator[tuple[str, Runs]]:
    """For each parameter, three runs in training mode with a product of its gradient in place of totals."""
    for name in runs[0].gradients:
        pairs = [each.gradients[name] for each in runs if name in each.gradients]
        largest, size = max(abs(total) for total, _ in pairs), max(size for _, size in pairs)
        is_rounding = size <= _NOTHING * runs[0].tolerance
        if len(pairs) == len(runs) and not is_rounding and 0 < largest < float("inf"):
            whole, large, small = (
                run._replace(total=total, tolerance=_SLACK * run.tolerance * size / largest)
                for run, (total, _) in zip(runs, pairs, strict=True)
            )
            yield name, (whole, large, small)


def _slopes(trial: Trial, batch: Batch, run: Run, numbers: Sequence[tuple[Tensor, bool]]) -> _Slopes:
    leaves = [each.clone().requires_grad_() for each, _ in numbers]
    given = iter(leaves)
    sums = [0.0, 0.0, 0.0]

    def asked(_: Any, each: Any) -> Any:
        # Clones, because a loss may write to them.
        return next(given).clone() if isinstance(each, Tensor) and each.is_floating_point() else None

    def look(total: Tensor, number: Any) -> None:
        del number
        gradients: Sequence[Tensor | None] = torch.autograd.grad(total, leaves, allow_unused=True)
        for leaf, gradient, (_, has_rows) in zip(leaves, gradients, numbers, strict=True):
            if has_rows and gradient is not None:
                along = leaf.detach().double().nan_to_num(0.0, 0.0, 0.0)
                one, other = gradient.double() * along, gradient.double() * along.cos()
                sums[0] += float(one.sum())
                sums[1] += float(other.sum())
                sums[2] += float(one.abs().sum() + other.abs().sum())

    with torch.enable_grad():
        output = changed({"": run.output}, asked)[""]
    found = trial.run(batch, output=output, look=look, asks=True)
    along, across, size = sums
    return _Slopes(along, across, size, found)


def _numbers_in(output: Any) -> list[Tensor]:
    return [each.detach().clone() for each in tensors_in({"": output}) if each.is_floating_point()]


def _is_mostly(part: Tensor, mine: Tensor) -> bool:
    """Whether most numbers of a part equal those of its own forward."""
    near = _NEAR * float(mine.abs().max())
    return float(((part - mine).abs() <= near).float().mean()) >= _MOST


def _has_rows(whole: Tensor, large: Tensor, small: Tensor) -> bool:
    """Whether the first dim of an output is rows."""
    if not whole.dim() or not len(whole) or whole.shape[1:] != large.shape[1:] or whole.shape[1:] != small.shape[1:]:
        return False
    return (len(large) * NUM_ROWS, len(small) * NUM_ROWS) == (len(whole) * FIRST, len(whole) * (NUM_ROWS - FIRST))
