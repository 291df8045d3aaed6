"""Bounds of layouts under schedules and ZeRO stages: close to their prices, at much less cost.

The time and activations of a microbatch on a stage do not depend on the schedule, nor does the traffic of replicas. So
these are computed once per layout. Each schedule then determines how long ranks idle, and how many microbatches they
hold.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from shardwise.cost.constants import CONSTANTS
from shardwise.cost.deal import Deal
from shardwise.cost.host import has_masters, least_exposed
from shardwise.cost.layouts import Layouts
from shardwise.cost.memory import StepBytes, freed_bytes, keep, step_bytes
from shardwise.cost.numbers import Floats, Ints
from shardwise.cost.pipeline import SCHEDULES, spans
from shardwise.cost.places import Counts, count_blocks, in_flight_under, typical_places
from shardwise.cost.replicas import exchange
from shardwise.cost.software import Software
from shardwise.cost.stage import Pricer, Stages, Work, add
from shardwise.cost.step import HOST_TAKEN, as_stage, hop_seconds, optimizer_seconds, slowest_stage
from shardwise.planner.question import Question
from shardwise.planner.search.choices import LEAST_OFFLOAD, Schedules, each_zero
from shardwise.schedule.catalogue import CATALOGUE

_COPIES = np.array([CATALOGUE[name].num_weight_copies for name in SCHEDULES])


class Cells(NamedTuple):
    """Candidates below some layouts: the layout, schedule and ZeRO stage of each, a lower bound of its seconds, and
    whether it fits only with offload."""

    layout: Ints
    schedule: Ints
    zero: Ints
    seconds: Floats
    is_tight: np.ndarray

    def take(self, index: Ints) -> "Cells":
        layout, schedule, zero, seconds, is_tight = self
        return Cells(layout[index], schedule[index], zero[index], seconds[index], is_tight[index])


def bound_schedules(
    question: Question, software: Software, layouts: Layouts, schedules: Schedules, zeros: list[tuple[int, int]],
    movable: Floats, wanted: Callable[[Floats], np.ndarray], on_host_wanted: Callable[[Floats, Ints], np.ndarray],
    tell: Callable[[StepBytes, np.ndarray], None],
) -> Cells:  # fmt: skip
    """Return the candidates that may fit, of each layout under each schedule and ZeRO stage.

    `movable`: the largest shares that may be offloaded, by recomputation. `wanted` selects layouts by their least
    seconds. `on_host_wanted` selects candidates that need offload, by least seconds and the indices of their layouts.
    `tell` gets the number of schedules per layout that do not fit.
    """
    allowed = schedules.allowed(layouts, max(question.model.num_layers, 1))
    seconds, pools = _seconds(question, software, layouts, schedules)
    chosen_layouts = np.flatnonzero(wanted(np.where(allowed, seconds, np.inf).min(axis=1)))
    layouts, allowed, seconds = layouts.take(chosen_layouts), allowed[chosen_layouts], seconds[chosen_layouts]
    pools = [_some(pool, chosen_layouts) for pool in pools]
    beside = _beside(question, software, layouts, pools)
    numbers = _numbers(layouts, schedules)
    one = replace(layouts, num_microbatches=np.ones_like(layouts.num_microbatches))
    # The number of microbatches does not decide which layers a rank has.
    account = holder(question, software, one, [stages.dealt for _, stages, _ in pools])
    of_each = account(one).parts["activations"]
    waits = beside.waits(LEAST_OFFLOAD * of_each.max(axis=1))[:, None]
    on_host = movable[layouts.recompute][:, :, None].transpose(1, 0, 2)
    all_of_each = of_each[:, :, None] * numbers
    fewest, most_at_once = (all_of_each.min(axis=2), all_of_each.max(axis=2))
    twice = _COPIES[schedules.code] > 1
    on_nodes = _room_on_hosts(question)
    found = []
    for index, (under, has_replicas) in enumerate(each_zero(one, zeros)):
        held = account(under)
        others = _without_activations(held, of_each, software, under)
        # For most layouts all schedules fit or none does. Only for the others the memory of each is computed.
        is_here = np.repeat(_fit(others.with_saved(most_at_once), question)[:, None], len(twice), axis=1)
        some = np.flatnonzero(~is_here[:, 0] & _fit(others.with_saved(fewest), question))
        is_here[some] = _most(others.take(some).with_saved(all_of_each[some])) <= question.room
        if twice.any():
            # Half of the microbatches use each copy of the ends. Layers hold at least as many as with one copy.
            is_here[:, twice] = _most(others.fixed[:, :, None] + 0.5 * all_of_each[:, :, twice]) <= question.room
        every = allowed & has_replicas[:, None]
        could = np.zeros_like(is_here)
        least = seconds + beside.exchange(under)[:, None]
        # Offload is computed only where it is allowed and not too slow.
        leaves = every & ~is_here & on_host_wanted(least, chosen_layouts) if movable.any() else np.zeros_like(is_here)
        full = np.flatnonzero(leaves.any(axis=1))
        if len(full):
            states, weights = _movable(held, on_host)
            of_full = all_of_each[full]
            here = others.take(full).with_saved(of_full)
            beyond = _most(here) - question.room
            here -= states[full]
            may_stay = _most(here) <= question.room
            here -= on_host[2][full, :, None] * (1.0 + others.lost_share[full])[:, None, None] * of_full
            may_leave = _most(here) <= question.room
            here -= weights[full]
            could[full] = (_most(here) <= question.room) & ~twice & (beyond <= on_nodes)
            # The least offload: states only, otherwise activations or weights.
            of_weights = beside.waits_for_weights(under, held)[full, None]
            waiting = np.where(may_stay, 0.0, np.where(may_leave, np.minimum(waits[full], of_weights), of_weights))
            least[full] += np.where(is_here[full], 0.0, waiting)
        lost = (every & ~is_here & ~could).sum(axis=1)
        if lost.any():
            tell(held, lost)
        rows, chosen = np.nonzero(every & (is_here | could))
        cell_seconds, is_tight = least[rows, chosen], ~is_here[rows, chosen]
        found.append(Cells(chosen_layouts[rows], chosen, np.full_like(rows, index), cell_seconds, is_tight))
    return Cells(*(np.concatenate(each) for each in zip(*found, strict=True)))


class _Others(NamedTuple):
    """The bytes held besides the activations of microbatches and their fragmentation: layouts x places; the share of
    activations lost to fragmentation; and, if the optimizer's step needs memory that activations have freed, its
    bytes."""

    fixed: Floats
    lost_share: Floats
    at_step: Floats | None

    def take(self, rows: Ints) -> "_Others":
        at_step = None if self.at_step is None else self.at_step[rows]
        return _Others(self.fixed[rows], self.lost_share[rows], at_step)

    def with_saved(self, saved: Floats) -> Floats:
        """Return all bytes, with these of activations: layouts x places (x schedules)."""
        more = (1,) * (saved.ndim - 2)
        fixed, lost = (each.reshape(*each.shape, *more) for each in (self.fixed, self.lost_share[:, None]))
        if self.at_step is None:
            return np.asarray(fixed + (1.0 + lost) * saved)
        return fixed + lost * saved + np.maximum(saved, self.at_step.reshape(*self.at_step.shape, *more))


def _without_activations(held: StepBytes, of_each: Floats, software: Software, under: Layouts) -> _Others:
    loses = ~((under.zero == 3) & software.shards_parameters) & ("fragments" in held.parts)
    lost_share = CONSTANTS.fragments * loses
    fixed = held.by_place - held.beyond_passes - (1.0 + lost_share)[:, None] * of_each
    if held.widened is None:
        return _Others(fixed, lost_share, None)
    at_step = held.widened - (freed_bytes(held.parts) - of_each)
    return _Others(fixed, lost_share, at_step if (at_step > of_each).any() else None)


def _room_on_hosts(question: Question) -> float:
    """Return the most bytes that a rank can free on its device: its share of host memory, and less fragmentation."""
    nodes = [pool.node for pool in question.cluster.pools]
    most = min(HOST_TAKEN * node.host.memory_bytes / node.devices_per_node for node in nodes)
    return most * (1.0 + max(CONSTANTS.fragments, CONSTANTS.fragments_states))


def _most(held: Floats) -> Floats:
    """Return the maximum over the three places of layouts x places (x schedules), faster than `max(axis=1)`."""
    return np.asarray(np.maximum(np.maximum(held[:, 0], held[:, 1]), held[:, 2]))


def _fit(held: Floats, question: Question) -> np.ndarray:
    """Return whether each layout fits on all of its places: layouts x places."""
    return np.asarray(_most(held) <= question.room)


def _some(values: Any, rows: Ints) -> Any:
    """Select the same rows of all arrays in a nested tuple."""
    if isinstance(values, tuple):
        some = [_some(each, rows) for each in values]
        return type(values)(*some) if hasattr(values, "_fields") else tuple(some)
    return values[rows] if isinstance(values, np.ndarray) and values.ndim else values


def _numbers(layouts: Layouts, schedules: Schedules) -> Floats:
    """Return the microbatches that typical ranks hold under each schedule: layouts x places x schedules."""
    last = np.asarray(layouts.pp - 1.0, dtype=np.float64)
    ranks = (np.zeros(len(layouts)), np.minimum(1.0, last), last)
    return in_flight_under(schedules.code, schedules.chunks, layouts, ranks)


def _movable(held: StepBytes, on_host: Floats) -> tuple[Floats, Floats]:
    """Return the bytes on each place that may be offloaded: states alone, and weights with all that moves with them and
    the fragmentation that they cause."""
    optimizer, weights, _ = on_host
    parts = held.parts
    more = np.maximum(weights - optimizer, 0.0) * parts["optimizer"] + weights * held.fragments_of_states
    moved = weights * (parts["weights"] + parts["masters"] + parts["gradients"]) + more
    return (optimizer * parts["optimizer"])[:, :, None], moved[:, :, None]


def holder(
    question: Question, software: Software, layouts: Layouts, dealt: Sequence[Deal] = ()
) -> Callable[[Layouts], StepBytes]:
    """Return a function that gives the bytes of these layouts under any ZeRO stage.

    `dealt`: how each pool of the cluster distributes the layers of these layouts, if it is already known.
    """
    pools, model, sequence = question.cluster.pools, question.model, question.sequence
    index = min(range(len(pools)), key=lambda index: pools[index].device.memory_bytes)
    pool = pools[index]
    pricer = Pricer(model=model, pool=pool, software=software, constants=CONSTANTS, sequence=sequence)
    places = typical_places(model, layouts, dealt[index] if dealt else pricer.stages(layouts).dealt)
    kept = keep(model, layouts, places, sequence=sequence, software=software)

    def held(under: Layouts) -> StepBytes:
        return step_bytes(model, pool.device, under, places, sequence=sequence, software=software, kept=kept)

    return held


class _Beside(NamedTuple):
    """The time that a step of the same layouts adds to its pipeline. It is the least of all pools, since it is not yet
    known which of them is the bottleneck."""

    layouts: Layouts
    pools: list[tuple[Pricer, Stages, Work]]
    counts: Counts

    def waits(self, saved: Floats) -> Floats:
        """Return the least seconds that a step waits if this many bytes of each microbatch are offloaded."""
        each = [least_exposed(pricer, pace, saved) for pricer, _, pace in self.pools]
        return np.asarray(self.layouts.num_microbatches * np.minimum.reduce(each))

    def waits_for_weights(self, under: Layouts, held: StepBytes) -> Floats:
        """Return the same if weights are on the host and are copied for both passes of every microbatch."""
        if has_masters(self.pools[0][0].software):
            at_home = held.parts["weights"].max(axis=1)
        else:
            whole = 4.0 * (self.counts.trained.dense + self.counts.trained.expert)
            at_home = np.where((under.zero == 3)[:, None], held.parts["masters"], whole).max(axis=1)
        each = [least_exposed(pricer, pace, at_home) for pricer, _, pace in self.pools]
        return np.asarray(self.layouts.num_microbatches * np.minimum.reduce(each))

    def exchange(self, under: Layouts) -> Floats:
        """Return the seconds of gradient exchange and optimizer, under one ZeRO stage."""
        under = replace(under, num_microbatches=self.layouts.num_microbatches)
        each = [
            exchange(pricer, under, self.counts, stages, pace) + optimizer_seconds(pricer, under, self.counts)
            for pricer, stages, pace in self.pools
        ]
        return np.asarray(np.minimum.reduce(each))


_Priced = tuple[Pricer, Stages, Work]


def _seconds(
    question: Question, software: Software, layouts: Layouts, schedules: Schedules
) -> tuple[Floats, list[_Priced]]:
    """Return the seconds of a step without replicas, optimizer and offload; and the prices of a stage on each pool."""
    found, pools = np.zeros((len(layouts), len(schedules.code))), []
    for pool in question.cluster.pools:
        pricer = Pricer(
            model=question.model, pool=pool, software=software, constants=CONSTANTS, sequence=question.sequence
        )
        stages, hop = pricer.stages(layouts), hop_seconds(pricer, layouts)
        works = stages.first, add(stages.middle, stages.extra), stages.last
        first, middle, last = (as_stage(each) for each in works)
        played = spans(
            schedules.code, schedules.chunks, layouts.pp, layouts.num_microbatches, first, middle, last, hop,
            steps_overlap=software.steps_overlap,
        )  # fmt: skip
        found = np.maximum(found, played + pricer.constants.step_seconds)
        pools.append((pricer, stages, slowest_stage(*works, layouts)))
    return found, pools


def _beside(question: Question, software: Software, layouts: Layouts, pools: list[_Priced]) -> _Beside:
    places = typical_places(question.model, layouts, pools[0][1].dealt)
    return _Beside(layouts, pools, count_blocks(question.model, layouts, places, cuts_experts=software.cuts_experts))
