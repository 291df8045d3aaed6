"""The choices below the axes: schedules with their chunks, recomputation, ZeRO, offload.

The `with_*` functions expand candidates: each is combined with every choice of one kind, as further rows.

Plans that the engine refuses are left out by the same table that the engine uses. When a rule is removed there, the
search considers those plans at once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from shardwise.cost.layouts import CONTEXT, ORDERS, RECOMPUTE, Layouts
from shardwise.cost.numbers import Floats, Ints
from shardwise.cost.pipeline import SCHEDULES, SPLITS_BACKWARD
from shardwise.errors import ShardwiseError
from shardwise.planner.composition import composes
from shardwise.planner.plan import Offload, Plan
from shardwise.planner.question import Question
from shardwise.schedule.catalogue import CATALOGUE

#: Numbers of chunks to try for schedules that take any number.
CHUNKS = (2, 3, 4, 5, 6, 8, 10, 12, 16)
_SHARES = (0.25, 0.5, 0.75)
# More microbatches than any batch has.
_NEVER = 2**40
_OFFLOADS = (0.0, 0.5, 1.0)
#: The smallest share that is offloaded, if any is.
LEAST_OFFLOAD = 0.5
# Whether each schedule holds one copy of the weights.
_ONCE = np.array([CATALOGUE[name].num_weight_copies == 1 for name in SCHEDULES])


class Schedules(NamedTuple):
    """Schedules with a number of chunks, with a column for each of their requirements."""

    code: Ints
    chunks: Ints
    least: Ints
    even: np.ndarray

    def allowed(self, layouts: Layouts, num_layers: int) -> np.ndarray:
        """Return which schedules each layout may have: layouts x schedules. Without a pipeline it is the first one."""
        ranks, steps = layouts.pp[:, None], layouts.num_microbatches[:, None]
        allowed = (ranks > 1) & (ranks * self.chunks <= num_layers) & (steps >= self.least * ranks)
        allowed &= ~(self.even & ((ranks % 2 == 1) | (steps % 2 == 1)))
        # A schedule with split backwards recomputes a stage as a whole, not some of its layers.
        allowed &= ~np.isin(self.code, SPLITS_BACKWARD) | (layouts.recompute_share == 1)[:, None]
        allowed[layouts.pp == 1] = np.arange(len(self.code)) == 0
        return allowed


def schedules(question: Question) -> Schedules:
    """Return every available schedule, plain 1F1B first: it stands for one rank, even if another schedule is fixed."""
    wanted, number = question.fixed.get("schedule"), question.fixed.get("chunks")
    is_plain = wanted in (None, "1f1b") and number in (None, 1)
    rows = []
    for name in SCHEDULES:
        entry = CATALOGUE[name]
        if wanted is not None and name not in (wanted, "1f1b"):
            continue
        for chunks in (entry.chunks,) if entry.any_chunks_from is None else CHUNKS if number is None else (number,):
            if entry.even_chunks and chunks % 2:
                continue
            if (number not in (None, chunks) or chunks < (entry.any_chunks_from or 1)) and name != "1f1b":
                continue
            if question.runnable and not _runs(dp=1, pp=2, schedule=name, chunks=chunks):
                continue
            least = entry.least_microbatches if name != "1f1b" or is_plain else _NEVER
            rows.append((SCHEDULES.index(name), chunks, least, entry.mirrored))
    return Schedules(*(np.array(column) for column in zip(*rows, strict=True)))


def recomputations(question: Question) -> list[tuple[int, float]]:
    """Return the kinds of recomputation, each with the share of layers that it applies to."""
    wanted = question.fixed.get("recompute")
    found = []
    for code, name in enumerate(RECOMPUTE):
        offload = _fixed_offload(question) or Offload()
        if wanted not in (None, name) or (question.runnable and not _runs(pp=2, recompute=name, offload=offload)):
            continue
        software = question.software_in("bf16")
        if name == "selective" and software.is_flash and not software.by_operation and wanted is None:
            continue  # Attention scores are not kept, so there is nothing to recompute.
        found.append((code, 1.0))
        if name == "full" and not (question.runnable and not _runs(pp=2, recompute=name, recompute_layers=1)):
            found += [(code, share) for share in _SHARES]
    return found


def zeros(question: Question, domain: int) -> list[tuple[int, int]]:
    """Return ZeRO stages, each with its group: 0 for all replicas, or the size of a domain of fast links. A fixed group
    size is negative: unlike a domain, it is not divided by the tensor parallel ranks in it."""
    wanted, group = question.fixed.get("zero"), question.fixed.get("zero_group")
    stages = range(4) if wanted is None else (int(wanted),)
    found = []
    for stage in stages:
        for size in (0, domain) if group is None else (-int(group),):
            if stage == 0 and size:
                continue
            if not question.runnable or _runs(dp=4, zero=stage, zero_group=2 if size else None):
                found.append((stage, size))
    return found


def offloads(question: Question) -> Floats:
    """Return the shares of optimizer, parameters and activations on the host: choices x 3. The first is none.

    CPUs have no choice: their memory is the host's.
    """
    fixed = _fixed_offload(question)
    if fixed is not None:
        return np.array([[fixed.optimizer, fixed.parameters, fixed.activations]])
    if question.device.architecture == "cpu":
        return np.zeros((1, 3))
    rows = [
        (optimizer, parameters, activations)
        for optimizer in _OFFLOADS
        for parameters in _OFFLOADS
        for activations in _OFFLOADS
        # States leave before weights: half of the weights only with all states.
        if (parameters != 0.5 or optimizer == 1.0)
        and (
            not question.runnable
            or _runs(pp=2, offload=Offload(optimizer=optimizer, parameters=parameters, activations=activations))
        )
    ]
    # The least traffic first: states move once per step, activations with every microbatch, weights twice with each.
    return np.array(sorted(rows, key=lambda row: (row[1], row[2], row[0])))


def offloads_by_recomputation(question: Question, offloads: Floats) -> np.ndarray:
    """Return which offloads can be combined with each kind of recomputation: kinds x choices."""
    return np.array(
        [
            [
                not question.runnable
                or _runs(pp=2, recompute=name, offload=Offload(optimizer=row[0], parameters=row[1], activations=row[2]))
                for row in offloads
            ]
            for name in RECOMPUTE
        ]
    )


def with_recomputations(layouts: Layouts, recomputations: list[tuple[int, float]]) -> Layouts:
    """Combine each layout with every recomputation."""
    codes, shares = (np.array(column) for column in zip(*recomputations, strict=True))
    found = layouts.take(np.repeat(np.arange(len(layouts)), len(codes)))
    return replace(found, recompute=np.tile(codes, len(layouts)), recompute_share=np.tile(shares, len(layouts)))


def with_schedules(
    layouts: Layouts, schedules: Schedules, recomputations: list[tuple[int, float]], num_layers: int
) -> Layouts:
    """Combine each layout with every schedule that it may have, and with every recomputation."""
    found = with_recomputations(layouts, recomputations)
    return with_schedule(found, schedules, *np.nonzero(schedules.allowed(found, num_layers)))


def with_schedule(layouts: Layouts, schedules: Schedules, rows: Ints, chosen: Ints) -> Layouts:
    """Return the layouts `rows`, each under its `chosen` schedule."""
    return replace(layouts.take(rows), schedule=schedules.code[chosen], chunks=schedules.chunks[chosen])


def each_zero(layouts: Layouts, zeros: list[tuple[int, int]]) -> Iterator[tuple[Layouts, np.ndarray]]:
    """Yield all layouts under one ZeRO stage after the other, and which of them have enough replicas for it."""
    replicas = layouts.dp * layouts.cp
    for index, (stage, size) in enumerate(zeros):
        under = with_zero(layouts, zeros, np.full_like(layouts.dp, index))
        groups = under.zero_group
        most = replicas if size < 0 else replicas - 1
        in_groups = (groups > 1) & (groups <= most) & (replicas % np.maximum(groups, 1) == 0)
        yield under, ((replicas > 1) | (stage == 0)) & ((groups == 0) | in_groups)


def with_zero(layouts: Layouts, zeros: list[tuple[int, int]], chosen: Ints) -> Layouts:
    """Return each layout under its chosen ZeRO stage.

    A group has the replicas of one domain of fast links: the size of the domain divided by tensor parallel ranks.
    """
    stages, domains = (np.array(column)[chosen] for column in zip(*zeros, strict=True))
    groups = np.where(domains > 0, np.maximum(domains // layouts.tp, 1), -domains)
    return replace(layouts, zero=stages, zero_group=groups)


def with_zeros(layouts: Layouts, zeros: list[tuple[int, int]]) -> Layouts:
    """Combine each layout with every ZeRO stage that its replicas allow."""
    return joined([under.take(np.flatnonzero(allowed)) for under, allowed in each_zero(layouts, zeros)])


def with_offloads(layouts: Layouts, offloads: Floats) -> Layouts:
    """Combine each layout with every offload."""
    found = layouts.take(np.repeat(np.arange(len(layouts)), len(offloads)))
    return with_offload(found, np.tile(offloads, (len(layouts), 1)))


def with_offload(layouts: Layouts, offload: Floats) -> Layouts:
    """Return each layout with its own offload: shares of optimizer, parameters and activations.

    Parameters are not offloaded if ranks hold them twice (`composition.py`).
    """
    parameters = np.where(holds_once(layouts), offload[:, 1], 0.0)
    return replace(
        layouts, offload_optimizer=offload[:, 0], offload_parameters=parameters, offload_activations=offload[:, 2]
    )


def holds_once(layouts: Layouts) -> np.ndarray:
    """Return whether each pipeline holds one copy of the model."""
    return np.asarray(_ONCE[layouts.schedule])


def joined(parts: list[Layouts]) -> Layouts:
    """Concatenate layouts."""
    return Layouts(
        **{each.name: np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(Layouts)}
    )


def _fixed_offload(question: Question) -> Offload | None:
    """Return the fixed offload; None if nothing of it is fixed."""
    names = ("optimizer", "parameters", "activations")
    said = {name: question.fixed.get(f"offload.{name}") for name in names}
    if all(each is None for each in said.values()):
        return None
    return Offload(**{name: 0.0 if each is None else float(each) for name, each in said.items()})


@cache
def axes_run(tp: bool, cp: bool, pp: bool, dp: bool, ep: bool, sp: bool, context: int, order: int) -> bool:
    """Whether the engine combines these axes, each with 2 ranks or 1."""
    size = {True: 2, False: 1}
    return _runs(
        tp=size[tp], cp=size[cp], pp=size[pp], dp=size[dp], ep=size[ep], sp=sp, context=CONTEXT[context],
        order=ORDERS[order],
    )  # fmt: skip


def precisions(question: Question) -> Iterator[str]:
    """Yield the precisions that the engine trains in, the fastest first."""
    for precision in question.precisions:
        if not question.runnable or _runs(precision=precision):
            yield precision


@cache
def _runs(**keys: Any) -> bool:
    """Whether the engine runs a small plan with these keys. Cached, as each precision asks the same."""
    usual: Mapping[str, Any] = {"microbatches": 4}
    try:
        return composes(Plan(**{**usual, **keys}))
    except ShardwiseError:
        return False
