"""Enumerate the ways to spread a batch over the devices of a cluster along the axes. The search starts from these."""

from collections.abc import Iterator
from functools import cache

import numpy as np

from shardwise.cost.bounds import least_bytes
from shardwise.cost.layouts import BALANCE, CONTEXT, ORDERS, Layouts
from shardwise.cost.memory import StepBytes
from shardwise.cost.numbers import Floats
from shardwise.cost.software import Software
from shardwise.planner.question import Question
from shardwise.planner.search.choices import axes_run
from shardwise.planner.search.tally import Tally

_COLUMNS = ("dp", "tp", "pp", "cp", "ep", "microbatch", "num_microbatches", "sequence_parallel", "context", "order")
#: The keys of a plan for the same columns. It has no key for the size of a microbatch.
_KEYS = ("dp", "tp", "pp", "cp", "ep", "", "microbatches", "sp", "context", "order")
_WORDS = {"context": CONTEXT, "order": ORDERS}


def spread_axes(question: Question, tally: Tally, weight: int) -> Layouts:
    """Return every even division of the devices into axes and of the batch into microbatches.

    `weight` is the number of choices below each, by which rejected ones are counted.
    """
    rows = []
    heads, domain = question.heads, min(pool.domain for pool in question.cluster.pools)
    for dp, tp, pp, cp in _grids(question.cluster.num_devices):
        reason = why_not(question, heads, domain, dp, tp, pp, cp)
        if reason is not None:
            tally.refused[reason] += weight
            continue
        for ep in _experts(question, dp * cp):
            for sp, context, order in _variations(heads // tp, dp, tp, pp, cp):
                if question.runnable and not axes_run(tp > 1, cp > 1, pp > 1, dp > 1, ep > 1, sp, context, order):
                    tally.refused["engines"] += weight
                    continue
                share = question.batch // dp
                for microbatch in divisors(share):
                    rows.append((dp, tp, pp, cp, ep, microbatch, share // microbatch, sp, context, order))
    kept = [row for row in rows if _is_wanted(question, row)] if question.fixed else rows
    columns = zip(*kept, strict=True) if kept else [[] for _ in _COLUMNS]
    return Layouts.of(
        **{name: np.array(column) for name, column in zip(_COLUMNS, columns, strict=True)},
        balance=BALANCE.index("ranks"),
    )


def leanest(question: Question, axes: Layouts, software: Software, offloads: Floats) -> tuple[StepBytes, np.ndarray]:
    """Return the least memory of a plan with each of these axes, with any of these offloads, and whether it fits."""
    pool = min(question.cluster.pools, key=lambda pool: pool.device.memory_bytes)
    most = offloads.max(axis=0)
    held = least_bytes(question.model, pool, axes, sequence=question.sequence, software=software, offloads=most)
    return held, held.peak <= pool.device.memory_bytes


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors, the smallest first."""
    return tuple(size for size in range(1, number + 1) if number % size == 0)


def _grids(num_devices: int) -> Iterator[tuple[int, int, int, int]]:
    for tp in divisors(num_devices):
        for cp in divisors(num_devices // tp):
            for pp in divisors(num_devices // tp // cp):
                yield num_devices // (tp * cp * pp), tp, pp, cp


def why_not(question: Question, heads: int, domain: int, dp: int, tp: int, pp: int, cp: int) -> str | None:
    """Return why a grid is rejected; None if it is not. `heads` may be cut; `domain` is the devices on fast links."""
    if (tp > 1 and not question.cuts_layers) or (cp > 1 and not question.cuts_sequences):
        return "model"
    if heads % tp or question.batch % dp or (cp > 1 and question.sequence % (2 * cp)):
        return "divisibility"
    if pp > max(question.model.num_layers, 1):
        return "divisibility"
    if domain % tp and tp % domain:
        return "topology"
    return None


def _experts(question: Question, replicas: int) -> list[int]:
    if question.num_experts == 1:
        return [1]
    return [size for size in divisors(question.num_experts) if replicas % size == 0]


def _variations(own_heads: int, dp: int, tp: int, pp: int, cp: int) -> Iterator[tuple[bool, int, int]]:
    """Yield sequence parallelism, the form of context parallelism, and which of data and pipeline is outermost."""
    for sp in (False, True) if tp > 1 else (False,):
        for context in range(len(CONTEXT)) if cp > 1 else (0,):
            if CONTEXT[context] == "all-to-all" and own_heads < cp:
                continue
            for order in range(len(ORDERS)) if dp > 1 and pp > 1 else (0,):
                yield sp, context, order


def _is_wanted(question: Question, row: tuple[int | bool, ...]) -> bool:
    """Whether a row agrees with the fixed keys. A fixed schedule, or its chunks, requires a pipeline."""
    is_piped = question.fixed.get("schedule", "1f1b") != "1f1b" or question.fixed.get("chunks", 1) > 1
    if is_piped and row[_KEYS.index("pp")] == 1:
        return False
    for key, value in zip(_KEYS, row, strict=True):
        if key in question.fixed and question.fixed[key] != (_WORDS[key][value] if key in _WORDS else value):
            return False
    return True
