"""Outputs of three rows for a trial of the loss alone: scaled apart, or in full precision.

They are scaled so that a loss with a threshold decides differently for each row.

A loss may count only rows above a threshold: hard ones, or confident ones. With an untrained module all rows are on one
side of it, and the loss looks like a mean over rows. Scaled apart, some rows are on the other side. The same holds for
numbers of the batch that a loss compares outputs with: advantages, or a reference's log-probabilities.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.stages.rows import Seen, changed, nodes
from shardwise.stages.stage import Batch
from shardwise.stages.trial_rows import FIRST, NUM_ROWS

#: The factors of the three rows: one set moves them further apart, the other closer to zero.
WAYS = ((1.0, 8.0, -8.0), (1.0, 0.125, 0.5))

#: How far numbers may be from the mean of those of parts, as a share of the largest of them.
_ROUNDED, _ROUNDED_TO_16_BITS = 1e-4, 2e-2
#: What the numbers of the three rows become, times their magnitudes.
SIGNED_WAYS = ((8.0, -8.0, -8.0), (-8.0, 8.0, 8.0))


def spread(outputs: tuple[Any, Any, Any], factors: tuple[float, ...]) -> tuple[Any, Any, Any] | None:
    """Return the outputs of three rows, of two and of the other, each row times its factor; None if none has rows."""
    lengths = [{path: len(each) for path, each in nodes({"": value}) if _may_have_rows(each)} for value in outputs]
    whole, large, small = lengths
    each_row = {
        path: number
        for path, number in small.items()
        if whole.get(path) == NUM_ROWS * number and large.get(path) == FIRST * number
    }
    made = [dict(nodes({"": value})) for value in outputs]
    each_row = {
        path: number for path, number in each_row.items() if number == 1 or _is_in_turn(*(each[path] for each in made))
    }
    if not each_row:
        return None

    def moved(value: Any, factors: tuple[float, ...]) -> Any:
        def move(path: str, given: Any) -> Any:
            if path not in each_row:
                return None
            by = torch.tensor(factors, dtype=given.dtype, device=given.device).repeat_interleave(each_row[path])
            return given * by.view(-1, *[1] * (given.dim() - 1))

        return changed({"": value}, move)[""]

    parts = (factors, factors[:FIRST], factors[FIRST:])
    one, two, three = (moved(value, part) for value, part in zip(outputs, parts, strict=True))
    return one, two, three


def in_full(outputs: tuple[Any, Any, Any], unrounded: Sequence[Any] = ()) -> tuple[Any, Any, Any] | None:
    """Return the outputs in float32, those of parts being rows of the whole: 16-bit forwards of other rows round
    differently. Numbers (a balancing loss) are those of the whole if they are a mean over rows, or a sum, up to
    rounding; else each part has its own. `unrounded` are the same outputs of a forward in float32, if there are: a
    number is nearly the mean of its parts where all rows are alike. None if there are tensors without rows."""
    made = [dict(nodes({"": value})) for value in outputs]
    full = [dict(nodes({"": value})) for value in unrounded]
    new: tuple[dict[str, Tensor], ...] = ({}, {}, {})
    for path, each in made[0].items():
        if not isinstance(each, Tensor) or not each.is_floating_point():
            continue
        parts = [other.get(path) for other in made]
        if each.dim():
            found = _rows(parts)
        else:
            exact = [other[path] for other in full if path in other]
            found = _numbers(exact, _ROUNDED) if len(exact) == len(parts) else _numbers(parts, _ROUNDED_TO_16_BITS)
        if found is None:
            return None
        for values, value in zip(new, found, strict=True):
            values[path] = value
    one, two, three = (_with(value, values) for value, values in zip(outputs, new, strict=True))
    return one, two, three


def _with(output: Any, values: dict[str, Tensor]) -> Any:
    return changed({"": output}, lambda path, _: values.get(path))[""]


def _rows(parts: list[Any]) -> tuple[Tensor, ...] | None:
    whole, large, small = parts
    if not all(_may_have_rows(each) for each in parts):
        return None
    has_rows = len(whole) * FIRST == len(large) * NUM_ROWS and len(whole) == len(small) * NUM_ROWS
    every = whole.float()
    return (every, every[: len(large)], every[len(large) :]) if has_rows and _is_in_turn(*parts) else None


def _numbers(parts: list[Any], rounding: float) -> tuple[Tensor, ...] | None:
    if not all(type(each) is Tensor and not each.dim() for each in parts):
        return None
    whole, large, small = (each.float() for each in parts)
    near = rounding * float(torch.stack([whole, large, small]).abs().max())
    if float((whole - (FIRST * large + small) / NUM_ROWS).abs()) <= near:
        return whole, whole, whole
    if float((whole - large - small).abs()) <= near:
        return whole, whole * FIRST / NUM_ROWS, whole / NUM_ROWS
    return whole, large, small


def spread_signals(three: Batch, seen: Seen, factors: tuple[float, ...]) -> Batch | None:
    """Return the batch with fractions of either sign far from zero, one sign for each row; None if there are none.

    Entries without negative fractions (probabilities, weights, masks) keep their values, and so do integers: they may
    be marks.
    """
    is_any = False

    def move(path: str, given: Any) -> Any:
        nonlocal is_any
        if path not in seen.paths or not _may_have_rows(given) or len(given) != NUM_ROWS:
            return None
        moves = given != given.round()
        if not (bool(given.isfinite().all()) and bool((moves & (given < 0)).any())):
            return None
        is_any = True
        by = torch.tensor(factors, dtype=given.dtype, device=given.device).view(-1, *[1] * (given.dim() - 1))
        return torch.where(moves, given.abs() * by, given)

    made = changed(three, move)
    return made if is_any else None


def _is_in_turn(whole: Tensor, large: Tensor, small: Tensor) -> bool:
    """Whether the several entries of each row are adjacent, rather than all first entries before all second ones."""
    parts = torch.cat([large, small])
    return parts.shape == whole.shape and torch.allclose(parts, whole, rtol=1e-2, atol=1e-5)


def _may_have_rows(value: Any) -> bool:
    return type(value) is Tensor and value.is_floating_point() and value.dim() > 0 and len(value) > 0
