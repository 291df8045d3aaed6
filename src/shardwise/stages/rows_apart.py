"""Whether the outputs of parts of a batch tell that of the whole: tried on a few rows, together and in two parts.

A loss is tried when an engine is made (`loss_trial.py`). What a module returns to the script itself is joined from
parts too, by `engine.predict` and by `sw.place` with microbatches. Rows may see each other there (`u @ v.T` over a
batch), and a number may be a sum, or a mean over labels of which parts have different numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.stages.label_counts import LabelCounts
from shardwise.stages.split.outline import open_dataclasses
from shardwise.torch_private import pytree

#: How a number without dims is joined: the parts' mean by rows, their sum, their mean by labels, or their mean by rows
#: as long as no labels are ignored.
Way = Literal["mean", "sum", "labels", "even"]
#: So many rows are tried, and half of them in each part.
NUM_ROWS = 4
#: This part of the labels is ignored in a second try, if the module computes a mean over labels.
IGNORED = 0.25
#: Differences that are rounding, relative to the largest number and absolute, by dtype. A GPU may multiply in TF32.
_NEAR = {torch.float64: (1e-6, 1e-9), torch.complex128: (1e-6, 1e-9), torch.float32: (1e-3, 1e-5)}
_NEAR_OTHERWISE = (5e-2, 1e-2)
#: Rounding may change some indices of largest values (`argsort`): by the distance of neighbours among so many values,
#: of which sums are off by some units of the last place. Never more than this part of them.
_INDICES, _UNITS_OFF = 0.1, 100
#: The distance of neighbouring numbers where a GPU may multiply in TF32.
_TF32 = 2.0**-10


class LabelsCounted(NamedTuple):
    """The means over labels that a module computed in one forward: how many, the number of labels if it is one, and how
    many labels of each were ignored on purpose."""

    num_means: int = 0
    labels: float | None = None
    left_out: Sequence[int] = ()
    ignores: bool = False


class Counting:
    """Makes what counts the labels of each part, of which a fraction or so many of each mean are `ignored`."""

    def __init__(self, ignored: Callable[[int], float | Sequence[int]] = lambda _: 0.0) -> None:
        self._ignored = ignored
        self._counts: dict[int, LabelCounts] = {}

    def __call__(self, part: int) -> LabelCounts:
        made = self._counts[part] = LabelCounts(self._ignored(part))
        return made

    def of(self, part: int) -> LabelsCounted:
        """Return what was counted in a part."""
        counts = self._counts.get(part)
        if counts is None:
            return LabelsCounted()
        number = float(counts.found[0].number) if len(counts.found) == 1 else None
        ignores = any(float(each.number) != each.size for each in counts.found)
        return LabelsCounted(len(counts.found), number, tuple(counts.left_out), ignores)


class Returned(NamedTuple):
    """What a module returned for some rows, and the means over labels that it computed for it."""

    output: Any
    num_rows: int
    counted: LabelsCounted = LabelsCounted()


class DrawnError(Exception):
    """Something was drawn at random: parts draw their own, and nothing is told."""


#: Computes rows together, or in two parts, and counts their labels.
Compute = Callable[[bool, Counting], list[Returned]]


def rounding_of(module: nn.Module, precision: str = "fp32") -> float:
    """Return the distance from 1 of the next number in the coarsest type that a module may compute with."""
    floating = [each for each in module.parameters() if each.is_floating_point()]
    steps = [_TF32 if each.is_cuda else torch.finfo(each.dtype).eps for each in floating]
    return max(steps + [torch.finfo(torch.bfloat16).eps] * (precision != "fp32"), default=torch.finfo().eps)


def find_ways(compute: Compute, remedy: str, *, rounding: float, takes_all: bool = False) -> Mapping[int, Way]:
    """Return how the numbers of an output are joined, by place. Refuse an output that its parts do not tell; but if it
    `takes_all`, a number that they do not tell is the mean of theirs. `rounding` is that of the module."""
    (whole,), halves = compute(True, Counting()), compute(False, Counting())
    _check(whole, halves, remedy, rounding)
    if takes_all:
        return {}
    ways = _ways(whole, halves)
    for number, (way, told) in ways.items():
        if way is None:
            raise ShardwiseError(
                f"the module returns a number (value {number + 1} of its output) {told}: it is neither their mean nor"
                " their sum, so that of a batch is not told by its parts",
                remedy=remedy,
            )
    if not whole.counted.num_means:
        return {number: way for number, (way, _) in ways.items() if way is not None}
    (whole,) = compute(True, Counting(lambda _: IGNORED))
    left_out = whole.counted.left_out
    hidden = _ways(whole, compute(False, Counting(lambda part: 0.0 if part % 2 else left_out)))
    # A number that labels do not decide is a mean by rows in both.
    return {number: "even" if way is None else "mean" if ways[number][0] == "mean" else way
            for number, (way, _) in hidden.items()}  # fmt: skip


def _leaves(whole: Returned, halves: Sequence[Returned]) -> Iterator[tuple[int, Any, list[Any]]]:
    """Yield the values of an output, by place, with those of its parts. Joining them reports other structures."""
    for each in (whole, *halves):
        open_dataclasses(each.output)
    (leaves, tree), *others = (pytree.tree_flatten(each.output) for each in (whole, *halves))
    if all(other == tree for _, other in others):
        yield from ((number, leaf, [each[number] for each, _ in others]) for number, leaf in enumerate(leaves))


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.dim() and leaf.is_floating_point()


def _check(whole: Returned, halves: Sequence[Returned], remedy: str, rounding: float) -> None:
    rows = [each.num_rows for each in halves]
    for number, leaf, parts in _leaves(whole, halves):
        if not _is_number(leaf) and not _is_told(leaf, parts, rows, rounding):
            raise ShardwiseError(
                f"the module's output for {whole.num_rows} rows is not that of {rows[0]} of them and that of the others"
                f" (value {number + 1} of it{_shapes(leaf, parts)}), so that of a batch cannot be joined from parts:"
                " rows see each other in the forward, or it depends on how many there are",
                remedy=remedy,
            )


def _ways(whole: Returned, halves: Sequence[Returned]) -> dict[int, tuple[Way | None, str]]:
    """Return for each number how it is joined, None if in no way that we know; and what it is."""
    found: dict[int, tuple[Way | None, str]] = {}
    labels = [each.counted.labels for each in halves if each.counted.labels is not None]
    rows = [each.num_rows for each in halves]
    for number, leaf, parts in _leaves(whole, halves):
        if _is_number(leaf):
            numbers = [each.double() for each in parts]
            told: dict[Way, Tensor] = {"mean": _weighed(numbers, rows), "sum": torch.stack(numbers).sum()}
            if len(labels) == len(halves) and any(labels):
                told = {"labels": _weighed(numbers, labels), **told}
            way = next((way for way, each in told.items() if _is_near(leaf, each.to(leaf.dtype))), None)
            one, other = (float(each) for each in numbers)
            words = (
                f"that is {float(leaf):.6g} for {whole.num_rows} rows, {one:.6g} for {rows[0]} of them and {other:.6g}"
            )
            found[number] = way, f"{words} for the others"
    return found


def _weighed(numbers: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    every = torch.tensor(weights, dtype=torch.float64, device=numbers[0].device)
    return (torch.stack(list(numbers)) * every).sum() / every.sum()


def _is_told(leaf: Any, parts: Sequence[Any], rows: Sequence[int], rounding: float) -> bool:
    """Whether the parts of a leaf tell the whole one, as far as they can be joined at all."""
    if not isinstance(leaf, Tensor):
        return all(type(each) is not type(leaf) or each == leaf for each in parts)
    if not all(isinstance(each, Tensor) and each.dim() == leaf.dim() for each in parts):
        return True
    if leaf.dim() and all(len(each) == count for each, count in zip(parts, rows, strict=True)):
        widths = [each.shape[1:] for each in parts]
        if widths[0] == widths[1]:
            fits = widths[0] == leaf.shape[1:] and len(leaf) == sum(rows)
            return fits and _is_near(leaf, torch.cat(list(parts)), rounding)
        return leaf.shape[1:] in widths  # Cut to the longest row of each part.
    is_same = all(each.shape == parts[0].shape and torch.equal(each, parts[0]) for each in parts)
    return not is_same or (leaf.shape == parts[0].shape and _is_near(leaf, parts[0], rounding))


def _is_near(one: Tensor, other: Tensor, rounding: float = 0.0) -> bool:
    if one.dtype != other.dtype or not one.numel():
        return True
    if not one.is_floating_point() and not one.is_complex():
        among = 1 + float(one.double().abs().max())
        return float((one != other).double().mean()) <= min(_INDICES, _UNITS_OFF * rounding * among)
    near, least = _NEAR.get(one.dtype, _NEAR_OTHERWISE)
    known = one.isfinite() & other.isfinite()
    if bool((one.isfinite() != other.isfinite()).any()):
        return False
    if not bool(known.any()):
        return True
    far = (one[known] - other[known]).abs().max()
    return float(far) <= (10 if one.is_cuda else 1) * near * float(one[known].abs().max()) + least


def _shapes(leaf: Any, parts: Sequence[Any]) -> str:
    if not isinstance(leaf, Tensor):
        return f": {leaf!r}, {' and '.join(map(repr, parts))}"
    shapes = ", ".join(str(tuple(each.shape)) for each in (leaf, *parts) if isinstance(each, Tensor))
    return f", of shapes {shapes}"
