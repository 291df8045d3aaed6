"""The search: bounds first, prices for what they leave, and an exact account of the best few.

1. `axes.py` divides devices and batch. Each division gets a lower bound of seconds and of bytes for all plans below it.
2. In the order of the first bound, blocks of divisions are combined with recomputation, schedules and ZeRO stages. Each
   candidate gets a bound that is close to its price (`schedule_bounds.py`).
3. The remaining candidates are priced in full; those that do not fit, with each offload that makes them fit.
4. The best, and the best of other kinds, get exact accounts: integer layers, simulated schedules, every rank.

A candidate is dropped only if a bound shows that it is slower than a known one, or that it does not fit. The most
promising of every kind (which axes are used) are kept anyway, as alternatives to compare with. Two numbers are bounded:
sure seconds, which are those of a step times a factor for configurations that no published run has shown; and weighed
seconds, which are those of a step times the whole handicap of a complex plan (`simplicity.py`). The answer has the
least weighed seconds of all candidates within 3 % of the least sure seconds. So a candidate is also dropped if another
has no more sure seconds and is simpler. The fastest by prediction alone is kept too, to report what it would gain.
"""

from collections import Counter
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardwise.cost.bounds import least_seconds
from shardwise.cost.layouts import Layouts
from shardwise.cost.memory import StepBytes
from shardwise.cost.numbers import Floats
from shardwise.cost.software import Software
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
    with_recomputations,
    with_schedule,
    with_zero,
    zeros,
)
from shardwise.planner.search.schedule_bounds import Cells, bound_schedules, holder
from shardwise.planner.search.simplicity import (
    ANY_HOST,
    BAND,
    doubt,
    handicap,
    of_axes,
    of_schedules,
    of_zeros,
    unproven,
)
from shardwise.planner.search.tally import Tally
from shardwise.working import working_at

# The number of axes expanded together, the number of candidates priced together, and how much slower than the best a
# candidate may be to be kept for comparison.
_BLOCK = 4096
_BATCH = 65_536
_SLACK = 0.03
# How many of each kind are kept regardless of bounds.
_OF_EACH_KIND = 1
# For each kind without a result so far, the schedules of this many layouts are tried regardless of bounds, both with
# one sample per microbatch and with more: the fastest may not fit.
_LAYOUTS_OF_EACH_KIND = 16
# The number of usual plans that are priced first: those with the lowest bounds.
_USUAL = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """Candidates that fit, in one precision, with their seconds as predicted and as compared."""

    precision: str
    layouts: Layouts
    seconds: Floats
    sure: Floats
    weighed: Floats


@dataclass(slots=True)
class Search:
    """The state of a search. `front`: increasing sure seconds of the results, each with the least weighed seconds of
    all results up to it. `fastest` is the least seconds without factors; `kinds` are those with results."""

    question: Question
    tally: Tally = field(default_factory=Tally)
    found: list[Fitting] = field(default_factory=list)
    front: tuple[Floats, Floats] = (np.array([np.inf]), np.array([np.inf]))
    fastest: float = np.inf
    kinds: set[int] = field(default_factory=set)
    spread: tuple[Layouts, Counter[str]] | None = None

    def axes(self, weight: int) -> Layouts:
        """Return all divisions of devices and batch, cached for all precisions. A rejected one counts `weight`."""
        if self.spread is None:
            fallen = Tally()
            self.spread = spread_axes(self.question, fallen, 1), fallen.refused
        axes, refused = self.spread
        self.tally.refused.update({reason: count * weight for reason, count in refused.items()})
        return axes

    def run(self) -> "Search":
        """Search all precisions, the fastest first."""
        for precision in precisions(self.question):
            _InPrecision(self, precision).run()
        return self

    @property
    def surest(self) -> float:
        """The least sure seconds."""
        return float(self.front[0][0])

    @property
    def best(self) -> float:
        """The least weighed seconds of all results within 3 % of the fastest."""
        return float(self._plainest(np.array((1 + BAND) * self.surest)))

    def is_near(self, seconds: Floats, sure: Floats, weighed: Floats) -> np.ndarray:
        """Return which candidates to keep, by their bounds: within 3 % of the fastest and about as simple as any result
        that is no slower; or faster than all."""
        near = (sure <= (1 + BAND) * self.surest) & (weighed <= (1 + _SLACK) * self._plainest(sure))
        return np.asarray(near | (sure < self.surest) | (seconds < self.fastest))

    def add(self, seconds: Floats, sure: Floats, weighed: Floats) -> None:
        """Add candidates that fit to the front."""
        self.fastest = min(self.fastest, float(seconds.min()))
        together = np.concatenate([self.front[0], sure]), np.concatenate([self.front[1], weighed])
        order = np.argsort(together[0], kind="stable")
        rising, least = together[0][order], np.minimum.accumulate(together[1][order])
        is_plainer = np.concatenate([[True], least[1:] < least[:-1]])
        self.front = rising[is_plainer], least[is_plainer]

    def _plainest(self, sure: Floats) -> Floats:
        """Return the least weighed seconds of all results with at most these sure seconds."""
        rising, least = self.front
        index = np.searchsorted(rising, sure, side="right")
        return np.asarray(np.where(index > 0, least[np.maximum(index - 1, 0)], np.inf))


class _Bounds(NamedTuple):
    """Lower bounds of candidates: seconds, sure seconds and weighed seconds."""

    seconds: Floats
    sure: Floats
    weighed: Floats

    def take(self, index: np.ndarray) -> "_Bounds":
        return _Bounds(*(each[index] for each in self))


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
        # The largest shares of optimizer, parameters and activations that may be offloaded, by recomputation.
        allowed = self.offloads_by_recomputation[:, :, None]
        self.movable = np.where(allowed, self.offloads, 0.0).max(axis=1)

    def run(self) -> None:
        tally = self.search.tally
        weight = len(self.schedules.code) * len(self.recomputations) * self.num_beneath
        axes = self.search.axes(weight)
        if len(axes) == 0:
            return
        axes, bounds = self._bounded(axes, weight)
        if len(axes) == 0:
            return
        self._begin_with_usual(axes, bounds.sure)
        order = np.argsort(bounds.sure, kind="stable")
        # Once there are results to compare with, bounds alone decide.
        each = 0 if self.search.found else _OF_EACH_KIND
        kept = _first_of_each(_axes_kind(axes), order, each)
        # Every block has a fixed cost. But as long as there is no result to drop others by, short blocks cost less.
        first = _BLOCK // (2 if np.isfinite(self.search.surest) else 16)
        for start, stop in _growing(len(order), _BLOCK, first):
            working_at(f"ways to divide the devices, in {self.precision}", start, len(order))
            block = order[start:stop]
            wanted = block[self.search.is_near(*bounds.take(block)) | kept[block]]
            tally.slower += (len(block) - len(wanted)) * weight
            if len(wanted):
                self._expand(axes.take(wanted))

    def _bounded(self, axes: Layouts, weight: int) -> tuple[Layouts, "_Bounds"]:
        """Return the axes that can fit at all, and lower bounds of their seconds."""
        question, search = self.question, self.search
        least = least_seconds(
            question.model, question.cluster, axes, sequence=question.sequence, software=self.software
        )
        bounds = _Bounds(least, least * unproven(question, axes), least * of_axes(question, axes))
        if search.found:
            # A slower precision has few candidates near the best, and memory is computed only for these.
            near = np.flatnonzero(search.is_near(*bounds))
            search.tally.slower += (len(axes) - len(near)) * weight
            axes, bounds = axes.take(near), bounds.take(near)
        held, fits = leanest(question, axes, self.software, self.offloads)
        search.tally.add_memory(held, ~fits, np.full(len(axes), weight))
        return axes.take(fits), bounds.take(fits)

    def _begin_with_usual(self, axes: Layouts, sure: Floats) -> None:
        """Price the usual plans first, so that bounds can drop others: one sample per microbatch, ZeRO 0 or 1, and no
        offload that is not fixed. Only those are priced that may be faster than all results so far."""
        is_usual = (axes.microbatch == 1) & (axes.order == 0) & (axes.context == 0) & (sure <= self.search.surest)
        is_usual &= axes.sequence_parallel == (axes.tp > 1)
        inside = copy(self)
        inside.search = Search(self.question, front=self.search.front, fastest=self.search.fastest)
        inside.zeros = [(stage, group) for stage, group in self.zeros if stage < 2] or self.zeros
        inside.offloads, inside.movable = self.offloads[:1], np.zeros_like(self.movable)
        usual = np.flatnonzero(is_usual)
        inside._expand(axes.take(usual[np.argsort(sure[usual], kind="stable")[:_USUAL]]))
        self.search.front, self.search.fastest = inside.search.front, inside.search.fastest

    def _expand(self, axes: Layouts) -> None:
        """Combine some axes with schedules and recomputation, and price in full what the bounds leave."""
        if len(axes) == 0:
            return
        layouts = with_recomputations(axes, self.recomputations)
        tally, weight = self.search.tally, len(self.offloads)
        kinds = _kind(layouts)
        doubts, weight_of_axes = unproven(self.question, layouts), of_axes(self.question, layouts)
        per_layout = weight * len(self.schedules.code) * len(self.zeros)

        def wanted(least: Floats) -> np.ndarray:
            sure, weighed = least * doubts, least * weight_of_axes
            apart = kinds * 2 + (layouts.microbatch == 1)
            missing = np.flatnonzero(~np.isin(kinds, list(self.search.kinds)))
            order = missing[np.argsort(sure[missing], kind="stable")]
            few = _first_of_each(apart, order, _LAYOUTS_OF_EACH_KIND)
            chosen: np.ndarray = self.search.is_near(least, sure, weighed) | few
            tally.slower += int((~chosen).sum()) * per_layout
            return chosen

        def on_host_wanted(least: Floats, rows: np.ndarray) -> np.ndarray:
            limit = (1 + BAND) * self.search.surest / (ANY_HOST * doubts[rows])
            return np.asarray((least <= limit[:, None]) | (least < self.search.fastest))

        cells = bound_schedules(
            self.question, self.software, layouts, self.schedules, self.zeros, self.movable, wanted, on_host_wanted,
            lambda held, counts: tally.add_memory(held, counts > 0, weight * counts),
        )  # fmt: skip
        bounds = self._cell_bounds(cells, doubts, weight_of_axes)
        order = np.argsort(bounds.sure, kind="stable")
        always = _first_of_each(kinds[cells.layout] * 2 + cells.is_tight, order, _OF_EACH_KIND)
        is_near = self.search.is_near(*bounds)
        near, rest = order[is_near[order]], order[~is_near[order]]
        kept = rest[always[rest]]
        for start, stop in _growing(len(near), _BATCH, _BATCH // 8):
            block = near[start:stop]
            is_near[block] = self.search.is_near(*bounds.take(block))
            block = block[is_near[block] | always[block]]
            rows = block if stop < len(near) else np.concatenate([block, kept])
            self._finish(layouts, cells.take(rows), is_near[rows])
        if not len(near):
            self._finish(layouts, cells.take(kept), is_near[kept])
        tally.slower += (len(rest) - len(kept)) * weight

    def _cell_bounds(self, cells: Cells, doubts: Floats, weight_of_axes: Floats) -> "_Bounds":
        """Return the bounds of candidates, with the factor for offload if they fit only with it."""
        stages, groups = (np.array(column) for column in zip(*self.zeros, strict=True))
        on_host = cells.seconds * np.where(cells.is_tight, ANY_HOST, 1.0)
        weight = weight_of_axes[cells.layout] * of_zeros(stages, groups)[cells.zero]
        weight *= of_schedules(self.schedules.code, self.schedules.chunks)[cells.schedule]
        return _Bounds(cells.seconds, on_host * doubts[cells.layout], on_host * weight)

    def _finish(self, layouts: Layouts, cells: Cells, is_near: np.ndarray) -> None:
        """Price some candidates in full: as they are if they fit, otherwise with each offload that makes them fit."""
        under = with_schedule(layouts, self.schedules, cells.layout, cells.schedule)
        under = with_offloads(with_zero(under, self.zeros, cells.zero), self.offloads[:1])
        wanted = [under.take(np.flatnonzero(~cells.is_tight))]
        # Offload never makes a candidate faster, so only candidates that do not fit are priced with it.
        tight = np.flatnonzero(cells.is_tight & is_near)
        if len(self.offloads) == 1 and self.offloads.any():
            wanted.append(under.take(tight))  # The given offload is the only one.
        elif len(self.offloads) > 1 and len(tight):
            under = under.take(tight)
            held = holder(self.question, self.software, under)(under)
            rows, chosen = self._made_to_fit(held, np.arange(len(under)), under)
            wanted.append(with_offload(under.take(rows), self.offloads[chosen]))
        self._keep(joined(wanted))

    def _made_to_fit(self, held: StepBytes, tight: np.ndarray, layouts: Layouts) -> tuple[np.ndarray, np.ndarray]:
        """Return pairs of a candidate and an offload that makes it fit. An offload is left out if another that fits
        moves no more of anything: it is slower. Fragmentation that leaves with weights may make it fit too."""
        over = held.by_place[tight] - self.question.room
        moved = [held.movable(*shares)[tight] for shares in self.offloads]
        runs = self.offloads_by_recomputation[layouts.recompute[tight]]
        runs &= holds_once(layouts)[tight, None] | (self.offloads[:, 1] == 0)
        fits = runs & np.stack([(over <= each).all(axis=1) for each in moved], axis=1)
        lost = held.fragments_of_states[tight]
        pairs = zip(self.offloads[:, 1], moved, strict=True)
        may_fit = runs & np.stack([(over <= each + share * lost).all(axis=1) for share, each in pairs], axis=1)
        is_less = (self.offloads[:, None] <= self.offloads).all(axis=2) & ~np.eye(len(self.offloads), dtype=bool)
        fits = may_fit & ~(fits @ is_less)
        rows, chosen = np.nonzero(fits)
        return tight[rows], chosen

    def _keep(self, layouts: Layouts) -> None:
        """Price candidates, keep those that fit, and count the others."""
        if len(layouts) == 0:
            return
        tally = self.search.tally
        tally.priced += len(layouts)
        found = self.question.price(layouts, self.software)
        tally.add_memory(found.bytes, ~found.fits, np.ones(len(layouts)))
        tally.fitting += int(found.fits.sum())
        if found.fits.any():
            fits = found.fits
            fitting = layouts.take(fits)
            seconds = found.seconds[fits]
            sure, weighed = seconds * doubt(self.question, fitting), seconds * handicap(self.question, fitting)
            self.search.found.append(
                Fitting(
                    precision=self.precision,
                    layouts=fitting,
                    seconds=seconds,
                    sure=sure,
                    weighed=weighed,
                )
            )
            self.search.add(seconds, sure, weighed)
            self.search.kinds.update(np.unique(_kind(fitting)).tolist())


def _kind(layouts: Layouts) -> np.ndarray:
    """Return which axes are used, and what is recomputed, as one number."""
    return np.asarray(_axes_kind(layouts) * 4 + layouts.recompute)


def _axes_kind(layouts: Layouts) -> np.ndarray:
    """Return which axes are used, as one number."""
    axes = np.stack([layouts.tp, layouts.pp, layouts.cp, layouts.ep]) > 1
    return np.asarray(np.array([1, 2, 4, 8]) @ axes)


def _first_of_each(kinds: np.ndarray, order: np.ndarray, count: int) -> np.ndarray:
    """Mark the first few of each kind in an order."""
    marked = np.zeros(len(kinds), dtype=bool)
    ordered = kinds[order]
    for kind in np.unique(ordered):
        marked[order[np.flatnonzero(ordered == kind)[:count]]] = True
    return marked


def _growing(count: int, most: int, first: int) -> Iterator[tuple[int, int]]:
    """Yield consecutive ranges of growing length, so that there is a result before much is expanded."""
    start, length = 0, first
    while start < count:
        yield start, min(start + length, count)
        start, length = start + length, min(2 * length, most)
