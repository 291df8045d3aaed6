"""What can be chosen beneath the axes: schedules with their chunks, recomputation, ZeRO, offload.

And candidates made of candidates: each with every choice of one kind beneath it, as further rows.

Everything that the engines refuse is left out here by the one table that they refuse by, so that the search learns of
an engine's new skill on the day that its rule goes.
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

# Chunks that are tried where a schedule takes any number.
_CHUNKS = (2, 3, 4, 5, 6, 8, 10, 12, 16)
_SHARES = (0.25, 0.5, 0.75)
# More microbatches than there are.
_NEVER = 2**40
_OFFLOADS = (0.0, 0.5, 1.0)
#: The least of anything that is on the host, if any of it is.
LEAST_OFFLOAD = 0.5
# Schedules under which the model is held once.
_ONCE = np.array([CATALOGUE[name].num_weight_copies == 1 for name in SCHEDULES])


class Schedules(NamedTuple):
    """Schedules with a number of chunks, a column for each thing that they ask for."""

    code: Ints
    chunks: Ints
    least: Ints
    even: np.ndarray

    def allowed(self, layouts: Layouts, num_layers: int) -> np.ndarray:
        """Which schedules each layout may have: layouts x schedules. One rank has no choice."""
        ranks, steps = layouts.pp[:, None], layouts.num_microbatches[:, None]
        allowed = (ranks > 1) & (ranks * self.chunks <= num_layers) & (steps >= self.least * ranks)
        allowed &= ~(self.even & ((ranks % 2 == 1) | (steps % 2 == 1)))
        # Where backwards are run in two halves, a stage is recomputed at once, and not some layers of it.
        allowed &= ~np.isin(self.code, SPLITS_BACKWARD) | (layouts.recompute_share == 1)[:, None]
        allowed[layouts.pp == 1] = np.arange(len(self.code)) == 0
        return allowed


def schedules(question: Question) -> Schedules:
    """Every schedule that may be chosen, plain 1F1B first: one rank has it, whatever is decided for several."""
    wanted, number = question.fixed.get("schedule"), question.fixed.get("chunks")
    is_plain = wanted in (None, "1f1b") and number in (None, 1)
    rows = []
    for name in SCHEDULES:
        entry = CATALOGUE[name]
        if wanted is not None and name not in (wanted, "1f1b"):
            continue
        for chunks in (entry.chunks,) if entry.any_chunks_from is None else _CHUNKS if number is None else (number,):
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
    """Kinds of recomputation, and the share of the layers that each is for."""
    wanted = question.fixed.get("recompute")
    found = []
    for code, name in enumerate(RECOMPUTE):
        offload = _fixed_offload(question) or Offload()
        if wanted not in (None, name) or (question.runnable and not _runs(pp=2, recompute=name, offload=offload)):
            continue
        software = question.software_in("bf16")
        if name == "selective" and software.is_flash and not software.by_operation and wanted is None:
            continue  # Scores of attention are not kept, so there is nothing to make again.
        found.append((code, 1.0))
        if name == "full" and not (question.runnable and not _runs(pp=2, recompute=name, recompute_layers=1)):
            found += [(code, share) for share in _SHARES]
    return found


def zeros(question: Question, domain: int) -> list[tuple[int, int]]:
    """ZeRO stages, each over all replicas (0) or over those of one domain of fast links; groups of a size that is
    decided beforehand are told by its negative, since they are no smaller for tensor parallel ranks between them."""
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
    """Shares of optimizer, parameters and activations on the host: choices x 3. The first is none.

    Processors have none to choose: their memory is the host's.
    """
    fixed = _fixed_offload(question)
    if fixed is not None:
        return np.array([[fixed.optimizer, fixed.parameters, fixed.activations]])
    if question.device.architecture == "cpu":
        return np.zeros((1, 3))
    rows = [
        (optimizer, parameters, activations)
        for optimizer in _OFFLOADS
        for parameters in (0.0, 1.0)
        for activations in _OFFLOADS
        if not question.runnable
        or _runs(pp=2, offload=Offload(optimizer=optimizer, parameters=parameters, activations=activations))
    ]
    # What moves least comes first: states once a step, activations with every microbatch, weights twice with each.
    return np.array(sorted(rows, key=lambda row: (row[1], row[2], row[0])))


def offloads_by_recomputation(question: Question, offloads: Floats) -> np.ndarray:
    """Which of these choices go with each kind of recomputation: kinds x choices."""
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
    """Each layout with every recomputation."""
    codes, shares = (np.array(column) for column in zip(*recomputations, strict=True))
    found = layouts.take(np.repeat(np.arange(len(layouts)), len(codes)))
    return replace(found, recompute=np.tile(codes, len(layouts)), recompute_share=np.tile(shares, len(layouts)))


def with_schedules(
    layouts: Layouts, schedules: Schedules, recomputations: list[tuple[int, float]], num_layers: int
) -> Layouts:
    """Each layout under every schedule that it may have, with every recomputation."""
    found = with_recomputations(layouts, recomputations)
    return with_schedule(found, schedules, *np.nonzero(schedules.allowed(found, num_layers)))


def with_schedule(layouts: Layouts, schedules: Schedules, rows: Ints, chosen: Ints) -> Layouts:
    """Some of the layouts, each under one of the schedules."""
    return replace(layouts.take(rows), schedule=schedules.code[chosen], chunks=schedules.chunks[chosen])


def each_zero(layouts: Layouts, zeros: list[tuple[int, int]]) -> Iterator[tuple[Layouts, np.ndarray]]:
    """All layouts under one ZeRO stage after the other, and which of them have the replicas for it."""
    replicas = layouts.dp * layouts.cp
    for index, (stage, size) in enumerate(zeros):
        under = with_zero(layouts, zeros, np.full_like(layouts.dp, index))
        groups = under.zero_group
        most = replicas if size < 0 else replicas - 1
        in_groups = (groups > 1) & (groups <= most) & (replicas % np.maximum(groups, 1) == 0)
        yield under, ((replicas > 1) | (stage == 0)) & ((groups == 0) | in_groups)


def with_zero(layouts: Layouts, zeros: list[tuple[int, int]], chosen: Ints) -> Layouts:
    """Each layout under its own ZeRO stage.

    A group is of the replicas of one domain of fast links: smaller by the tensor parallel ranks between them.
    """
    stages, domains = (np.array(column)[chosen] for column in zip(*zeros, strict=True))
    groups = np.where(domains > 0, np.maximum(domains // layouts.tp, 1), -domains)
    return replace(layouts, zero=stages, zero_group=groups)


def with_zeros(layouts: Layouts, zeros: list[tuple[int, int]]) -> Layouts:
    """Each layout under every ZeRO stage that its replicas allow."""
    return joined([under.take(np.flatnonzero(allowed)) for under, allowed in each_zero(layouts, zeros)])


def with_offloads(layouts: Layouts, offloads: Floats) -> Layouts:
    """Each layout with every choice of what lives on the host."""
    found = layouts.take(np.repeat(np.arange(len(layouts)), len(offloads)))
    return with_offload(found, np.tile(offloads, (len(layouts), 1)))


def with_offload(layouts: Layouts, offload: Floats) -> Layouts:
    """Each layout with its own choice: shares of optimizer, parameters and activations.

    Parameters stay where ranks hold them twice (`composition.py`).
    """
    parameters = np.where(holds_once(layouts), offload[:, 1], 0.0)
    return replace(
        layouts, offload_optimizer=offload[:, 0], offload_parameters=parameters, offload_activations=offload[:, 2]
    )


def holds_once(layouts: Layouts) -> np.ndarray:
    """Whether each pipeline holds the model once."""
    return np.asarray(_ONCE[layouts.schedule])


def joined(parts: list[Layouts]) -> Layouts:
    """Several layouts as one."""
    return Layouts(
        **{each.name: np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(Layouts)}
    )


def _fixed_offload(question: Question) -> Offload | None:
    """What is decided beforehand of the host, if anything is."""
    names = ("optimizer", "parameters", "activations")
    said = {name: question.fixed.get(f"offload.{name}") for name in names}
    if all(each is None for each in said.values()):
        return None
    return Offload(**{name: 0.0 if each is None else float(each) for name, each in said.items()})


@cache
def axes_run(tp: bool, cp: bool, pp: bool, dp: bool, ep: bool, sp: bool, context: int, order: int) -> bool:
    """Whether the engines combine these axes, each taken as 2 or 1 ranks."""
    size = {True: 2, False: 1}
    return _runs(
        tp=size[tp], cp=size[cp], pp=size[pp], dp=size[dp], ep=size[ep], sp=sp, context=CONTEXT[context],
        order=ORDERS[order],
    )  # fmt: skip


def precisions(question: Question) -> Iterator[str]:
    """Precisions that the engines train in, the fastest first."""
    for precision in question.precisions:
        if not question.runnable or _runs(precision=precision):
            yield precision


@cache
def _runs(**keys: Any) -> bool:
    """Whether the engines run a small plan that is otherwise plain. Each precision asks the same."""
    usual: Mapping[str, Any] = {"microbatches": 4}
    try:
        return composes(Plan(**{**usual, **keys}))
    except ShardwiseError:
        return False
