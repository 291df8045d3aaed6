"""The search: bounds first, prices for what they leave, and an exact account of the best few.

1. `axes.py` divides devices and batch. A bound on seconds and a bound on bytes for each: nothing beneath it is better.
2. In the order of the first bound, blocks of these get schedules and recomputation; priced without what ZeRO decides,
   they are bounds again, and tighter.
3. What is left gets ZeRO stages and offload, and is priced in full.
4. The best, and the best of other kinds, are accounted for exactly: integer layers, schedules played, every rank.

A candidate is let go only when a bound says that it is slower than what was found, or that it does not fit. Of every
kind (which axes are used at all) the most promising are kept all the same, so that there is something to compare with.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from shardwise.cost.bounds import least_seconds
from shardwise.cost.layouts import Layouts
from shardwise.cost.memory import StepBytes
from shardwise.cost.numbers import Floats
from shardwise.cost.software import Software
from shardwise.cost.step import Estimate
from shardwise.planner.question import Question
from shardwise.planner.search.axes import leanest, spread_axes
from shardwise.planner.search.choices import (
    Schedules,
    holds_once,
    joined,
    offloads,
    offloads_by_recomputation,
    precisions,
    recomputations,
    schedules,
    with_offload,
    with_offloads,
    with_schedules,
    with_zeros,
    zeros,
)
from shardwise.planner.search.tally import Tally
from shardwise.working import working_at

# Axes of a block that is expanded together, candidates that are priced together, and how much slower than the best
# something may be and still be looked at, for the comparison.
_BLOCK = 384
_BATCH = 49_152
_SLACK = 0.03
# How many of each kind are kept whatever the bounds say.
_OF_EACH_KIND = 1
# What moves to the host with weights, at most.
_WITH_WEIGHTS = ("weights", "masters", "gradients")
# What of a step depends on ZeRO and offload: left out of the second bound.
_DECIDED_LAST = ("dp", "optimizer", "offload")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """Candidates that fit, in one precision, with their seconds and the parts of these."""

    precision: str
    layouts: Layouts
    seconds: Floats
    parts: dict[str, Floats]


@dataclass(slots=True)
class Search:
    """One search under way."""

    question: Question
    tally: Tally = field(default_factory=Tally)
    found: list[Fitting] = field(default_factory=list)
    best: float = np.inf

    def run(self) -> "Search":
        """Search all precisions, the fastest first."""
        for precision in precisions(self.question):
            _InPrecision(self, precision).run()
        return self

    @property
    def limit(self) -> float:
        """Seconds beyond which a candidate is of no interest."""
        return self.best * (1 + _SLACK)


class _InPrecision:
    """The search in one precision."""

    def __init__(self, search: Search, precision: str) -> None:
        question = search.question
        self.search, self.question, self.precision = search, question, precision
        self.software: Software = question.software_in(precision)
        self.schedules: Schedules = schedules(question)
        self.recomputations = recomputations(question)
        self.zeros = zeros(question, min(pool.domain for pool in question.cluster.pools))
        self.offloads = offloads(question)
        self.offloads_by_recomputation = offloads_by_recomputation(question, self.offloads)
        self.num_beneath = len(self.zeros) * len(self.offloads)

    def run(self) -> None:
        tally = self.search.tally
        weight = len(self.schedules.code) * len(self.recomputations) * self.num_beneath
        axes = spread_axes(self.question, tally, weight)
        if len(axes) == 0:
            return
        axes, bound = self._bounded(axes, weight)
        order = np.argsort(bound, kind="stable")
        # Once there is something to compare with, kinds need no second chance.
        each = 0 if self.search.found else _OF_EACH_KIND
        kept = _first_of_each(_axes_kind(axes), order, each)
        for start, stop in _growing(len(order), _BLOCK):
            working_at(f"ways to divide the devices, in {self.precision}", start, len(order))
            block = order[start:stop]
            wanted = block[(bound[block] <= self.search.limit) | kept[block]]
            tally.slower += (len(block) - len(wanted)) * weight
            if len(wanted):
                self._expand(axes.take(wanted))

    def _bounded(self, axes: Layouts, weight: int) -> tuple[Layouts, Floats]:
        """The axes that can fit at all, and the seconds below which none of their steps is."""
        held, fits = leanest(self.question, axes, self.software, self.offloads)
        self.search.tally.add_memory(held, ~fits, np.full(len(axes), weight))
        axes = axes.take(fits)
        bound = least_seconds(
            self.question.model, self.question.cluster, axes, sequence=self.question.sequence, software=self.software
        )
        return axes, bound

    def _expand(self, axes: Layouts) -> None:
        """Schedules and recomputation beneath some axes, and what is left of them in full."""
        num_layers = max(self.question.model.num_layers, 1)
        layouts = with_schedules(axes, self.schedules, self.recomputations, num_layers)
        bounds, kept = [], []
        for start in range(0, len(layouts), _BATCH):
            part = layouts.take(slice(start, start + _BATCH))
            found = self._price(part)
            fits = self._could_fit(part, found)
            self.search.tally.add_memory(found.bytes, ~fits, np.full(len(part), self.num_beneath))
            bounds.append((found.seconds - sum(found.parts[name] for name in _DECIDED_LAST))[fits])
            kept.append(part.take(fits))
        layouts, bound = joined(kept), np.concatenate(bounds)
        order = np.argsort(bound, kind="stable")
        always = _first_of_each(_axes_kind(layouts) * 4 + layouts.recompute, order, _OF_EACH_KIND)
        most = max(_BATCH // len(self.zeros), 1)
        for start, stop in _growing(len(order), most):
            block = order[start:stop]
            wanted = block[(bound[block] <= self.search.limit) | always[block]]
            self.search.tally.slower += (len(block) - len(wanted)) * self.num_beneath
            if len(wanted):
                self._finish(layouts.take(wanted))

    def _could_fit(self, layouts: Layouts, found: Estimate) -> np.ndarray:
        """Whether states shared out as far as they can be would make room."""
        parts = found.bytes.parts
        replicas = (layouts.dp * layouts.cp)[:, None]
        spread = 1.0 - 1.0 / replicas
        states = parts["gradients"] + parts["optimizer"] + parts["masters"]
        movable = states * spread + np.where(replicas > 1, parts["weights"], 0.0)
        if self.offloads.any():
            allowed = self.offloads_by_recomputation[:, :, None]
            most = np.where(allowed, self.offloads, 0.0).max(axis=1)
            optimizer, weights, activations = most[layouts.recompute].T[:, :, None]
            weights = np.where(holds_once(layouts)[:, None], weights, 0.0)
            moved = np.maximum(optimizer, weights) * parts["optimizer"]
            moved = moved + weights * (parts["masters"] + parts["gradients"])
            left_states = (states - moved) * (1.0 - spread)
            movable = states - left_states + np.where(replicas > 1, 1.0, weights) * parts["weights"]
            movable = movable + activations * parts["activations"]
        # Fragments are a share of some of these.
        left = found.bytes.by_place - movable - parts.get("fragments", np.zeros(()))
        return np.asarray(left.max(axis=1) <= self.question.room)

    def _finish(self, layouts: Layouts) -> None:
        """ZeRO and offload beneath some candidates, priced in full."""
        layouts = with_offloads(with_zeros(layouts, self.zeros), self.offloads[:1])
        found = self._price(layouts)
        self._keep(layouts, found)
        # What fits as it is gains nothing from the host, and what does not is no faster with it.
        tight = np.flatnonzero(~found.fits & (found.seconds <= self.search.limit))
        if len(self.offloads) > 1 and len(tight):
            rows, chosen = self._made_to_fit(found.bytes, tight, layouts)
            if len(rows):
                on_host = with_offload(layouts.take(rows), self.offloads[chosen])
                self._keep(on_host, self._price(on_host))

    def _made_to_fit(self, held: StepBytes, tight: np.ndarray, layouts: Layouts) -> tuple[np.ndarray, np.ndarray]:
        """Which candidates choices of offload make fit, each with those that do: but for what moves more of one thing,
        and less of none, than another that does. It takes longer."""
        states, activations = (held.parts[name][tight] for name in ("optimizer", "activations"))
        weights = sum((held.parts[name][tight] for name in _WITH_WEIGHTS), np.zeros(()))
        over = held.by_place[tight] - self.question.room
        moved = [
            max(optimizer, parameters) * states + parameters * weights + host * activations
            for optimizer, parameters, host in self.offloads
        ]
        fits = np.stack([(over <= each).all(axis=1) for each in moved], axis=1)
        fits &= self.offloads_by_recomputation[layouts.recompute[tight]]
        fits &= holds_once(layouts)[tight, None] | (self.offloads[:, 1] == 0)
        is_less = (self.offloads[:, None] <= self.offloads).all(axis=2) & ~np.eye(len(self.offloads), dtype=bool)
        fits &= ~(fits @ is_less)
        rows, chosen = np.nonzero(fits)
        return tight[rows], chosen

    def _keep(self, layouts: Layouts, found: Estimate) -> None:
        """Keep what fits, and count what does not."""
        tally = self.search.tally
        tally.add_memory(found.bytes, ~found.fits, np.ones(len(layouts)))
        tally.fitting += int(found.fits.sum())
        if found.fits.any():
            fits = found.fits
            self.search.found.append(
                Fitting(
                    precision=self.precision,
                    layouts=layouts.take(fits),
                    seconds=found.seconds[fits],
                    parts={name: part[fits] for name, part in found.parts.items()},
                )
            )
            self.search.best = min(self.search.best, float(found.seconds[fits].min()))

    def _price(self, layouts: Layouts) -> Estimate:
        self.search.tally.priced += len(layouts)
        return self.question.price(layouts, self.software)


def _axes_kind(layouts: Layouts) -> np.ndarray:
    """Which axes are used at all, as one number."""
    axes = np.stack([layouts.tp, layouts.pp, layouts.cp, layouts.ep]) > 1
    return np.asarray(np.array([1, 2, 4, 8]) @ axes)


def _first_of_each(kinds: np.ndarray, order: np.ndarray, count: int) -> np.ndarray:
    """Mark the first few of each kind in an order."""
    marked = np.zeros(len(kinds), dtype=bool)
    ordered = kinds[order]
    for kind in np.unique(ordered):
        marked[order[np.flatnonzero(ordered == kind)[:count]]] = True
    return marked


def _growing(count: int, most: int) -> Iterator[tuple[int, int]]:
    """Stretches of a list: short ones first, so that something is found before much is looked at."""
    start, length = 0, max(most // 8, 1)
    while start < count:
        yield start, min(start + length, count)
        start, length = start + length, min(2 * length, most)
