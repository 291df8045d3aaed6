"""Comparison of two trainings, value by value, in the order in which a step computes them.

    weights as the forward uses them, first to last · the loss · gradients, last layer first · their norm · new weights
    · the loss of a held-out batch, where it is evaluated

So the first difference is at the cause, not only at a symptom. The gradient of a weight that is used twice is complete
when the backward reaches its first use.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shardwise.parity.course import Course, Step

#: The limit of relative errors in fp32.
LIMIT = 1e-5
#: The error of a gradient that is zero except for rounding is relative to this share of the largest gradient: the limit
#: is then 1e-7 of that, the resolution of fp32. The same holds for a weight that started at zero and has such a
#: gradient, such as a key bias, to which softmax is invariant: relative to this share of the largest RMS of a weight.
_LEAST = 1e-2

Kind = Literal["used weight", "loss", "gradient", "norm", "weight", "evaluation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The error of a scalar or a tensor of a step, on the rank where it is largest.

    `error` is |ours - theirs| / |theirs|, infinite if it is absent or NaN. `times` is the ratio of our value to the
    expected one, in the direction of the expected one.
    """

    kind: Kind
    name: str | None
    step: int
    rank: int
    error: float
    times: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All differences, in the order of the computation."""

    differences: Sequence[Difference]
    limit: float = LIMIT

    @property
    def is_same(self) -> bool:
        return self.first is None

    @property
    def first(self) -> Difference | None:
        """The first difference over the limit. For a loss or a norm, `name` is the first tensor over the limit."""
        over = [each for each in self.differences if each.error > self.limit]
        if not over:
            return None
        return replace(over[0], name=next((each.name for each in over if each.name is not None), None))

    def worst(self, *kinds: Kind) -> float:
        """Return the largest error of these kinds."""
        return max((each.error for each in self.differences if each.kind in kinds), default=0.0)

    def worst_tensors(self, count: int) -> list[Difference]:
        """Return the tensors with the largest errors, each once; for equal errors, the earlier one first."""
        tensors = sorted((each for each in self.differences if each.name is not None), key=lambda each: -each.error)
        found: dict[str | None, Difference] = {}
        for each in tensors:
            found.setdefault(each.name, each)
        return list(found.values())[:count]


def compare(expected: Course, found: Sequence[Course], limit: float = LIMIT) -> Comparison:
    """Compare the courses of all ranks with that of one device."""
    differences: list[Difference] = []
    for number, wanted in enumerate(expected.steps):
        ours = [course.steps[number] for course in found]
        every = [*_measured(expected, wanted, ours), *_evaluated(expected, found, number)]
        for kind, name, measured in every:
            rank = max(range(len(ours)), key=[each.error for each in measured].__getitem__)
            error, times = measured[rank]
            differences.append(Difference(kind=kind, name=name, step=number, rank=rank, error=error, times=times))
    return Comparison(differences=differences, limit=limit)


class _Apart(NamedTuple):
    """The error of a value on one rank: see `Difference`."""

    error: float
    times: float


def _measured(course: Course, wanted: Step, ours: Sequence[Step]) -> Iterator[tuple[Kind, str | None, list[_Apart]]]:
    """Yield the compared values of a step, in order, with the errors of all ranks."""
    seen = {name: each for name, each in wanted.used.items() if any(name in step.used for step in ours)}
    largest = _largest(wanted.used) if seen else 0.0
    for name in _ordered(seen, course.first_use):
        least = _least_weight(seen[name], largest)
        yield "used weight", name, _all_apart([step.used.get(name) for step in ours], seen[name], least)
    yield "loss", None, [_numbers_apart(step.loss, wanted.loss) for step in ours]
    # Tensors that were not recorded on one device are not compared.
    gradients = [step.gradients for step in ours] if wanted.gradients else []
    weights = [step.weights for step in ours] if wanted.weights else []
    least = _LEAST * max((float(each.norm()) for each in wanted.gradients.values()), default=0.0)
    for name in _ordered(_all_names(wanted.gradients, gradients), course.first_use[::-1]):
        theirs = wanted.gradients.get(name)
        yield "gradient", name, _all_apart([step.gradients.get(name) for step in ours], theirs, least)
    yield "norm", None, [_numbers_apart(step.norm, wanted.norm) for step in ours]
    largest = _largest(wanted.weights)
    for name in _ordered(_all_names(wanted.weights, weights), course.first_use):
        theirs = wanted.weights.get(name)
        least = _least_weight(theirs, largest)
        yield "weight", name, _all_apart([step.weights.get(name) for step in ours], theirs, least)


def _evaluated(expected: Course, found: Sequence[Course], step: int) -> Iterator[tuple[Kind, str | None, list[_Apart]]]:
    """Yield the loss of the held-out batch, if it was evaluated after a step."""
    if step in expected.evaluations:
        wanted = expected.evaluations[step]
        yield "evaluation", None, [_numbers_apart(each.evaluations.get(step, math.nan), wanted) for each in found]


def _largest(weights: Mapping[str, Tensor]) -> float:
    """Return the largest RMS of any weight tensor."""
    sizes = [
        float(each.norm()) / each.numel() ** 0.5
        for each in weights.values()
        if each.is_floating_point() and each.numel()
    ]
    return max(sizes, default=0.0)


def _least_weight(weight: Tensor | None, largest: float) -> float:
    """Return the least value that a weight's error is relative to."""
    if weight is None or not weight.is_floating_point():
        return 0.0
    return float(_LEAST * largest * weight.numel() ** 0.5)


def _all_names(one: Mapping[str, Tensor], others: Sequence[Mapping[str, Tensor]]) -> dict[str, None]:
    return dict.fromkeys([*one, *(name for other in others for name in other)])


def _ordered(names: Iterable[str], order: Sequence[str]) -> list[str]:
    """Return names in an order; names that it lacks come last."""
    places = {name: place for place, name in enumerate(order)}
    return sorted(names, key=lambda name: places.get(name, len(places)))


def _all_apart(found: Sequence[Tensor | None], wanted: Tensor | None, least: float) -> list[_Apart]:
    """Return the errors of the tensors of all ranks. Most often all are equal, and are measured once."""
    apart: list[_Apart] = []
    first = found[0]
    for each in found:
        is_again = bool(apart) and first is not None and each is not None and _are_equal(each, first)
        apart.append(apart[0] if is_again else _apart(each, wanted, least))
    return apart


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _apart(found: Tensor | None, wanted: Tensor | None, least: float = 0.0) -> _Apart:
    """Return the error of a tensor, relative to `least` if the tensor is smaller."""
    if found is None or wanted is None or found.shape != wanted.shape:
        return _Apart(math.inf, math.nan)
    ours, theirs = found.double().flatten(), wanted.double().flatten()
    size = float(theirs.norm())
    off, along = float((ours - theirs).norm()), float(ours @ theirs)
    return _Apart(_relative(off, max(size, least)), along / size**2 if size else math.nan)


def _numbers_apart(found: float, wanted: float) -> _Apart:
    return _Apart(_relative(abs(found - wanted), abs(wanted)), found / wanted if wanted else math.nan)


def _relative(off: float, size: float) -> float:
    if not math.isfinite(off):
        return math.inf
    return off / size if size else math.inf if off else 0.0
