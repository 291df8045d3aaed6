"""The rows on which a loss is tried: three of an example, two and one of them, and the same with values hidden."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from shardwise.stages.batch import picked
from shardwise.stages.rows import Seen, changed, nodes, take_rows
from shardwise.stages.stage import Batch

NUM_ROWS = 3
#: The number of rows in the first of two parts.
FIRST = 2
#: The label that torch's losses ignore.
IGNORED = -100
#: Labels that others ignore, or that a user's mask leaves out.
MARKS = (IGNORED, -1)
#: Values that may mark an unknown target where targets are floats.
UNKNOWN = (0.0, -1.0, float(IGNORED), math.nan)
#: Numbers of a code are tried as marks up to this size, if they are that far from 0; and as many of them.
_MOST_MARK, _LEAST_MARK, _MOST_NUMBERS = 2**31, 2.0, 12
#: A factor that puts a number behind a threshold.
_BEYOND = 1.125
#: About this many integers are tried as replacements in an entry.
_MOST_WORDS = 12


def three_rows(example: Batch, seen: Seen) -> Batch:
    """Return three rows of an example, repeating the last if there are fewer. The second is most unlike the first."""
    other = _most_unlike(example, seen)
    order = [0, other, *(number for number in range(1, seen.length) if number != other)]
    places = [order[min(number, seen.length - 1)] for number in range(NUM_ROWS)]
    return picked(example, seen, places)


def _most_unlike(example: Batch, seen: Seen) -> int:
    """Return the first row that differs from row 0 in the most entries with one integer per row: a class, a task."""
    entries = [
        each.tolist()
        for path, each in nodes(example)
        if path in seen.paths and isinstance(each, Tensor) and each.dim() == 1 and not each.is_floating_point()
    ]
    differences = [sum(each[row] != each[0] for each in entries) for row in range(1, seen.length)]
    return 1 + differences.index(max(differences)) if differences else 0


def two_and_one(three: Batch, seen: Seen) -> tuple[Batch, Batch]:
    return take_rows(three, seen, 0, FIRST), take_rows(three, seen, FIRST, NUM_ROWS)


def with_hidden(
    three: Batch, seen: Seen, value: float | None, only: str | None = None, *, rows: int = FIRST,
    tokens: slice | None = None,
) -> Batch:  # fmt: skip
    """Return the batch with smaller masks and weights for some rows, and `value` for some integers there.

    A float `value` is put into float entries, and all others are left alone. Half of a row is hidden, or these `tokens`
    of it.
    """

    def hide(path: str, given: Any) -> Any:
        if path not in seen.paths or not isinstance(given, Tensor) or (only is not None and path != only):
            return None
        if isinstance(value, float) and not given.is_floating_point():
            return None
        is_one = is_mask(given) and not isinstance(value, float)
        is_label = value == IGNORED or (value in MARKS and not isinstance(value, float))
        if given.is_complex() or (is_label and (is_one or given.is_floating_point())):
            return None
        made = given.clone()
        if given.is_floating_point() and not is_one and not isinstance(value, float):
            made[0] = made[0] * 0.25
        elif given.dim() > 1:
            half = (given.shape[-1] + 1) // 2
            these = tokens or (slice(half, None) if rows > 1 else slice(half))
            _hide(made[:rows, ..., these], value, is_one=is_one)
        else:
            _hide(made[:1], value, is_one=is_one)
        return made

    return changed(three, hide)  # type: ignore[no-any-return]


def _hide(part: Tensor, value: float | None, *, is_one: bool) -> None:
    # What a mask hides already is shown: a flag that is off in the example may be on later.
    part[:] = int(not part.any()) if is_one else value or 0


def is_mask(value: Tensor) -> bool:
    return value.dtype is torch.bool or bool(((value == 0) | (value == 1)).all())


def ways_to_hide(three: Batch, seen: Seen, numbers: Iterable[float] = ()) -> Iterator[tuple[str, float | None]]:
    """Yield the entries that may hide something, with values that may mark it; `numbers` are those in a code."""
    integers, fractions = integers_of(numbers), fractions_of(numbers)
    for path, value in nodes(three):
        if path in seen.paths and isinstance(value, Tensor):
            is_whole = not is_mask(value) and not value.is_floating_point()
            yield from [(path, 0), *((path, each) for each in MARKS)] if is_whole else [(path, None)]
            yield from [(path, each) for each in (*UNKNOWN, *fractions)] if value.is_floating_point() else []
            yield from [(path, each) for each in integers if _has_room(value, each)] if is_whole else []


def _has_room(entry: Tensor, number: int) -> bool:
    limits = torch.iinfo(entry.dtype)
    return limits.min <= number <= limits.max


def integers_of(numbers: Iterable[float]) -> tuple[int, ...]:
    """Return the integers of a code that may mark labels as none: padding, a void class."""
    found = sorted({int(each) for each in numbers if float(each).is_integer() and abs(each) < _MOST_MARK}, key=abs)
    return tuple([each for each in found if each not in (0, *MARKS)][:_MOST_NUMBERS])


def fractions_of(numbers: Iterable[float]) -> tuple[float, ...]:
    """Return floats on both sides of the numbers of a code, which may be thresholds: `targets > -900`."""
    found = sorted({float(each) for each in numbers if _LEAST_MARK <= abs(each) < _MOST_MARK}, key=abs)
    return tuple(side for each in found[-_MOST_NUMBERS:] for side in (each, each * _BEYOND))


def words_of(three: Batch, path: str) -> list[int]:
    """Return a few integers within the range of an entry."""
    entry = next(value for here, value in nodes(three) if here == path)
    most = int(entry.max())
    return sorted({1 + (most - 1) * number // _MOST_WORDS for number in range(_MOST_WORDS + 1)} if most > 0 else ())


def has_fractions(three: Batch, seen: Seen) -> bool:
    found = (value for path, value in nodes(three) if path in seen.paths)
    return any(isinstance(value, Tensor) and value.is_floating_point() for value in found)
