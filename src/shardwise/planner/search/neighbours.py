"""Plans that differ from one plan in a single choice, and in what that choice brings with it.

Another size of an axis leaves another size for `dp`, or, where that cannot give or take, for the next axis. Samples in
a microbatch stay as they are. Choices that become possible (sequence parallelism with `tp`, a schedule with `pp`, ZeRO
with replicas) may have any value, and those that become meaningless are left out.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from shardwise.errors import ShardwiseError
from shardwise.planner.account import Account, check_question, layouts_of
from shardwise.planner.composition import composes
from shardwise.planner.plan import CONTEXT, ORDERS, RECOMPUTE, Plan, largest_divisor
from shardwise.planner.question import Question
from shardwise.planner.search.axes import divisors, why_not
from shardwise.planner.search.choices import CHUNKS, recomputations
from shardwise.planner.search.simplicity import doubt, handicap
from shardwise.schedule.catalogue import CATALOGUE

_GRID = ("dp", "pp", "cp", "tp")
_STAGES = range(4)
# Schedules of a pipeline where there was none: the plain one, and the two that shorten its bubble most often.
_FIRST_SCHEDULES = (("1f1b", None), ("interleaved", 2), ("interleaved", 4), ("zb-v", None))
# Schedules with few activations: 1F1B recomputes well, V-Min has the fewest.
_LEAN_SCHEDULES = (("1f1b", None), ("v-min", None))


class Neighbour(NamedTuple):
    """A plan with another choice of `key`. `name` is how it differs, as it is typed."""

    key: str
    name: str
    plan: Plan


class Candidate(NamedTuple):
    """A neighbour by closed forms: seconds with their parts, what is asked of them for not being plain and for being
    doubted, and bytes of the fullest rank and of its host."""

    key: str
    name: str
    plan: Plan
    seconds: float
    parts: Mapping[str, float]
    handicap: float
    doubt: float
    peak: float
    host: float
    fits: bool

    @property
    def weighed(self) -> float:
        return self.seconds * self.handicap

    @property
    def sure(self) -> float:
        return self.seconds * self.doubt


class Around(NamedTuple):
    """A plan's account, the same by closed forms, and its neighbours."""

    best: Account
    itself: Candidate
    neighbours: list[Candidate]


def look_around(best: Account) -> Around:
    """Price all plans that differ from a plan in one choice."""
    question, plan = best.question, best.plan
    itself, *others = price_plans(question, [Neighbour("", "", plan), *neighbours(question, plan)])
    return Around(best, itself, others)


def price_plans(question: Question, plans: Sequence[Neighbour]) -> list[Candidate]:
    """Return prices by closed forms, in the same order."""
    found: dict[int, Candidate] = {}
    for precision in {each.plan.precision for each in plans}:
        rows = [row for row, each in enumerate(plans) if each.plan.precision == precision]
        layouts = layouts_of(question, *(plans[row].plan for row in rows))
        price = question.price(layouts, question.software_in(precision))
        columns = price.seconds, handicap(question, layouts), doubt(question, layouts), price.bytes.peak
        for index, row in enumerate(rows):
            seconds, weight, doubted, peak = (float(column[index]) for column in columns)
            found[row] = Candidate(
                *plans[row], seconds=seconds, parts={name: float(part[index]) for name, part in price.parts.items()},
                handicap=weight, doubt=doubted, peak=peak, host=float(price.bytes.host[index]),
                fits=bool(price.fits[index]),
            )  # fmt: skip
    return [found[row] for row in range(len(plans))]


def neighbours(question: Question, plan: Plan) -> list[Neighbour]:
    """Return all plans that differ in one choice, can be run, and keep fixed keys."""
    plan = replace(plan, reasons={}, layers=question.fixed.get("layers"))
    found = [each for axis in ("tp", "pp", "cp") for each in _of_axis(question, plan, axis)]
    for key, name, changed in (*_of_grid(question, plan), *_of_pipeline(plan), *_of_memory(question, plan)):
        made = _made(question, plan, changed)
        if made is not None:
            found.append(Neighbour(key, name, made))
    return found


def leaner(question: Question, each: Neighbour) -> list[Neighbour]:
    """Return variants with less memory, with names that say how: another schedule or ZeRO stage, more recomputation,
    half of the samples at once."""
    plan, found = each.plan, []
    schedules = {(plan.schedule, plan.chunks), *(_LEAN_SCHEDULES if plan.pp > 1 else ())}
    stages = _STAGES if plan.dp * plan.cp > 1 else (0,)
    recomputed = RECOMPUTE[RECOMPUTE.index(plan.recompute) :]
    share = question.batch // plan.dp
    halved = share // largest_divisor(share, max(share // plan.microbatches // 2, 1))
    for schedule, *rest in product(schedules, stages, recomputed, {plan.microbatches, halved}):
        keys = ("schedule", "zero", "recompute", "microbatches")
        changed: dict[str, Any] = dict(zip(keys, (schedule[0], *rest), strict=True))
        told = [f"{key}={value}" for key, value in changed.items() if value != getattr(plan, key)]
        changed |= {"chunks": schedule[1], "zero_group": plan.zero_group if changed["zero"] else None}
        if changed["recompute"] != plan.recompute:
            changed["recompute_layers"] = None
        made = _made(question, plan, changed) if told else None
        if made is not None:
            found.append(Neighbour(each.key, ",".join(told), made))
    return found


def _made(question: Question, plan: Plan, changed: dict[str, Any]) -> Plan | None:
    """Return the plan with some changes; None if it cannot be run, or a fixed key would change."""
    if any(key in question.fixed and value != getattr(plan, key) for key, value in changed.items()):
        return None
    try:
        made = replace(plan, **changed)
        check_question(question, made)
    except ShardwiseError:
        return None
    if made.cp > 1 and made.context == "all-to-all" and question.heads // made.tp < made.cp:
        return None  # Each rank has a head at least.
    return made if composes(made) or not question.runnable else None


def _of_axis(question: Question, plan: Plan, axis: str) -> Iterator[Neighbour]:
    """Yield plans with the next smaller and the next larger size."""
    size, sizes = getattr(plan, axis), divisors(plan.num_ranks)
    for others in (reversed([each for each in sizes if each < size]), [each for each in sizes if each > size]):
        yield from next(filter(None, (_with_size(question, plan, axis, other) for other in others)), ())


def _with_size(question: Question, plan: Plan, axis: str, size: int) -> list[Neighbour]:
    """Return plans with another size of an axis, and another size of the first axis that can give or take the ranks."""
    heads, domain = question.heads, min(pool.domain for pool in question.cluster.pools)
    for partner in _GRID:
        both = getattr(plan, axis) * getattr(plan, partner)
        if partner == axis or both % size:
            continue
        grid = {each: getattr(plan, each) for each in _GRID} | {axis: size, partner: both // size}
        if why_not(question, heads, domain, **grid) is not None:
            continue
        name = f"{axis}={size}" + (f",{partner}={grid[partner]}" if partner != "dp" else "")
        made = (_made(question, plan, {**grid, **rest}) for rest in _brought(question, plan, grid))
        found = [Neighbour(axis, name, each) for each in made if each is not None]
        if found:
            return found
    return []


def _brought(question: Question, plan: Plan, grid: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yield the other keys that change with sizes."""
    share, replicas = question.batch // grid["dp"], grid["dp"] * grid["cp"]
    microbatch = question.batch // (plan.dp * plan.microbatches)
    always: dict[str, Any] = {"microbatches": share // largest_divisor(share, microbatch)}
    sizes = divisors(question.num_experts)
    always["ep"] = max(size for size in sizes if size <= plan.ep and replicas % size == 0)
    if grid["dp"] == 1 or grid["pp"] == 1:
        always["order"] = ORDERS[0]
    if plan.zero_group is not None and replicas % plan.zero_group:
        always["zero_group"] = None
    if plan.recompute_layers is not None:
        always["recompute_layers"] = max(plan.recompute_layers * plan.pp // grid["pp"], 1)
    sp = _if_new(plan.tp, grid["tp"], plan.sp, (True, False), False)
    context = _if_new(plan.cp, grid["cp"], plan.context, CONTEXT, CONTEXT[0])
    schedule = _if_new(plan.pp, grid["pp"], (plan.schedule, plan.chunks), _FIRST_SCHEDULES, ("1f1b", None))
    zero = _if_new(plan.dp * plan.cp, replicas, (plan.zero, plan.zero_group), [(n, None) for n in _STAGES], (0, None))
    for one, kind, (name, chunks), (stage, group) in product(sp, context, schedule, zero):
        yield {"sp": one, "context": kind, "schedule": name, "chunks": chunks, "zero": stage, "zero_group": group} | (
            always
        )


def _if_new(before: int, after: int, same: Any, every: Iterable[Any], none: Any) -> Iterable[Any]:
    """Return the values to try for a choice that only exists for an axis of more than one rank."""
    return (none,) if after == 1 else every if before == 1 else (same,)


def _of_grid(question: Question, plan: Plan) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield other choices for the same axes: experts, sequences, order, microbatches."""
    if plan.tp > 1:
        yield "sp", f"sp={str(not plan.sp).lower()}", {"sp": not plan.sp}
    if plan.cp > 1:
        other = CONTEXT[1 - CONTEXT.index(plan.context)]
        yield "context", f"context={other}", {"context": other}
    if plan.dp > 1 and plan.pp > 1:
        other = ORDERS[1 - ORDERS.index(plan.order)]
        yield "order", f"order={other}", {"order": other}
    replicas = plan.dp * plan.cp
    for size in _beside(plan.ep, (size for size in divisors(question.num_experts) if replicas % size == 0)):
        yield "ep", f"ep={size}", {"ep": size}
    for count in _beside(plan.microbatches, divisors(question.batch // plan.dp)):
        yield "microbatches", f"microbatches={count}", {"microbatches": count}


def _of_pipeline(plan: Plan) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield other schedules, and other numbers of chunks."""
    if plan.pp == 1:
        return
    for name, entry in CATALOGUE.items():
        numbers = (entry.chunks,) if entry.any_chunks_from is None else CHUNKS
        for chunks in numbers if name != plan.schedule else ():
            told = f"schedule={name}" + (f",chunks={chunks}" if len(numbers) > 1 else "")
            yield "schedule", told, {"schedule": name, "chunks": chunks if len(numbers) > 1 else None}
    if plan.chunks is not None:
        for chunks in _beside(plan.chunks, CHUNKS):
            yield "chunks", f"chunks={chunks}", {"chunks": chunks}


def _of_memory(question: Question, plan: Plan) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield other choices for memory: ZeRO, recomputation, precision."""
    if plan.dp * plan.cp > 1:
        for stage in _beside(plan.zero, _STAGES):
            yield "zero", f"zero={stage}", {"zero": stage, "zero_group": plan.zero_group if stage else None}
        if plan.zero_group is not None:
            yield "zero_group", "zero over all replicas", {"zero_group": None}
    for code in _beside(RECOMPUTE.index(plan.recompute), {code for code, _ in recomputations(question)}):
        changed = {"recompute": RECOMPUTE[code], "recompute_layers": None}
        yield "recompute", f"recompute={RECOMPUTE[code]}", changed
    if plan.recompute_layers is not None:
        yield "recompute_layers", "all layers", {"recompute_layers": None}
    for precision in question.precisions:
        if precision != plan.precision:
            yield "precision", f"precision={precision}", {"precision": precision}


def _beside(value: int, values: Iterable[int]) -> list[int]:
    """Return the next smaller and the next larger of some values."""
    known = list(values)
    return [*sorted(each for each in known if each < value)[-1:], *sorted(each for each in known if each > value)[:1]]
