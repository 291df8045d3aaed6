"""The result of a search: the best plan, a few of other kinds, and why candidates were rejected."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from shardwise.cost.layouts import CONTEXT, ORDERS, RECOMPUTE
from shardwise.cost.memory import SPARE, SPREAD
from shardwise.cost.numbers import Floats
from shardwise.cost.pipeline import SCHEDULES
from shardwise.planner.account import Account, account, hold, layouts_of
from shardwise.planner.plan import Offload, Plan
from shardwise.planner.question import Question
from shardwise.planner.search.choices import joined
from shardwise.planner.search.neighbours import Around, look_around
from shardwise.planner.search.nowhere import nowhere
from shardwise.planner.search.reasons import with_reasons
from shardwise.planner.search.search import Fitting, Search
from shardwise.planner.search.simplicity import BAND, doubt, handicap
from shardwise.planner.search.tally import Tally

# Exact accounts are made of the best candidates by closed forms: until `_BEST` fit exactly, and of at most `_MOST`, or
# `_MOST_TRIED` as long as none fits. Of other kinds: until more than `_OTHER_KINDS` fit, and of at most `_MOST_KINDS`.
_BEST, _MOST, _MOST_TRIED = 3, 8, 24
# At most this many per grid, schedule and chunks, whether they fit or not: they are much alike.
_OF_ONE = 2
_OTHER_KINDS, _MOST_KINDS = 4, 12
_SHOWN = 4
# The best may take this much longer than closed forms predicted. If nothing within it fits exactly, the search is
# repeated with memory reduced by these shares.
_NEAR = 0.1
_LESS_ROOM = (0.05, 0.12)
# Plans whose time and memory differ by no more than this count as the same.
_SAME = 1e-3
# Standard deviations of memory to spare if the alternative is offload: the plan then fits two times out of three.
_LESS_SPARE = 0.43
_NOTHING_ON_HOST = {"offload.optimizer": 0.0, "offload.parameters": 0.0, "offload.activations": 0.0}
# At most this many rounds in which a better neighbour replaces the best, its least gain, and the smallest ratio of the
# exact memory to that of closed forms.
_REFINED, _BETTER, _LEAST_OF_CLOSED = 4, 0.005, 0.8
# Exact accounts are made of this many of the fastest, however complex: the answer has to be near them.
_FASTEST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The best plan with its reasons, others from best to worst, and the search's record."""

    question: Question
    best: Account
    others: tuple[Account, ...]
    tally: Tally
    #: A plan that is predicted to be faster than the best, but not by enough to make up for its complexity.
    fastest: Account | None = None

    @property
    def plan(self) -> Plan:
        return self.best.plan

    def within(self, seconds: float) -> "Findings | None":
        """Return these findings if the best step takes at most `seconds`, or with the fastest if only that does."""
        if self.best.seconds <= seconds:
            return self
        if self.fastest is None or self.fastest.seconds > seconds:
            return None
        return replace(self, best=self.fastest, fastest=None).explained()

    def explained(self, around: Around | None = None) -> "Findings":
        """Return the same with a reason for each choice of the best. `around` has its neighbours, if they are known."""
        shown = [each for each in (self.fastest, *self.others) if each is not None]
        return replace(self, best=with_reasons(around or look_around(self.best), shown))


def kind_of(plan: Plan) -> tuple[bool, ...]:
    """Return the kind of a plan: which axes it uses, and how it saves memory."""
    axes = (plan.tp > 1, plan.pp > 1, plan.cp > 1, plan.ep > 1)
    return (*axes, plan.zero == 3, plan.recompute != "none", plan.offload != Offload())


def find_plan(question: Question) -> Findings:
    """Search, and make exact accounts of the best. If nothing fits, raise an error that says what it would take."""
    tally = Tally()
    found = find_plan_if_any(question, tally)
    if found is None:
        raise nowhere(question, tally)
    return found


def find_plan_if_any(question: Question, tally: Tally) -> Findings | None:
    """Do the same, but return None if nothing fits. `tally` counts the rejected candidates by reason.

    A plan should leave as much memory free as predictions of memory may be off. If none does, one that just fits is
    returned. If one does only with offload, a plan without offload that leaves less free is preferred if it is faster.
    """
    found = _find_with_reserve(question, tally)
    return None if found is None else replace(_refined(found), question=question)


def _refined(found: Findings) -> Findings:
    """Return the same with a better neighbour of the best, if there is one, and with reasons. If one rank has both ends
    of the model, closed forms for memory are up to a fifth too high, and the search rejects plans that fit."""
    around = look_around(found.best)
    for _ in range(_REFINED):
        better = better_neighbour(around)
        if better is None:
            break
        around = look_around(better)
    best = around.best
    if best is found.best:
        return found.explained(around)
    fastest = found.fastest if found.fastest is not None and _is_faster(found.fastest, best) else None
    others = [each for each in found.others if kind_of(each.plan) != kind_of(best.plan)]
    if kind_of(found.plan) != kind_of(best.plan):
        others.insert(0, found.best)
    return replace(found, best=best, fastest=fastest, others=tuple(others[:_SHOWN])).explained(around)


def better_neighbour(around: Around) -> Account | None:
    """Return the best neighbour that fits exactly, is as fast, and is simpler or faster; None if there is none."""
    itself, best = around.itself, around.best
    room = best.question.room / _LEAST_OF_CLOSED
    promising = [
        each
        for each in around.neighbours
        if each.sure <= itself.sure and each.weighed < (1 - _BETTER) * itself.weighed and each.peak <= room
    ]
    for each in sorted(promising, key=lambda each: each.weighed):
        if all(rank.total <= best.question.room for rank in hold(best.question, each.plan)):
            exact = with_layers(account(best.question, each.plan))
            is_better = weighed_seconds(exact) < (1 - _BETTER) * weighed_seconds(best)
            if exact.fits and is_better and sure_seconds(exact) <= sure_seconds(best):
                return exact
    return None


def _find_with_reserve(question: Question, tally: Tally) -> Findings | None:
    if question.device.architecture == "cpu" or question.reserve:
        return _find(question, tally)
    found = _find(_with_reserve(question, SPARE), Tally())
    if found is None:
        return _find(question, tally)
    if found.plan.offload != Offload() and not any(key in question.fixed for key in _NOTHING_ON_HOST):
        here = replace(question, fixed={**question.fixed, **_NOTHING_ON_HOST})
        nearer = _find(_with_reserve(here, _LESS_SPARE), Tally())
        if nearer is not None and sure_seconds(nearer.best) < sure_seconds(found.best):
            found = replace(nearer, others=(found.best, *nearer.others)[:_SHOWN])
    return found


def _with_reserve(question: Question, spare: float) -> Question:
    """Return the question with this many standard deviations of predicted memory to spare."""
    return replace(question, reserve=float(np.expm1(spare * SPREAD)))


def _find(question: Question, tally: Tally) -> Findings | None:
    """Search, and make exact accounts of the results. Closed forms may accept candidates that just do not fit, and
    reject all others for them. So if nothing near their prediction fits exactly, search again with less memory."""
    found = _find_within(question, question, tally)
    if tally.fitting == 0:
        return None
    for less in _LESS_ROOM:
        if found is not None and found.is_as_promised:
            return found.findings
        again = _find_within(question, replace(question, reserve=question.reserve + less), Tally())
        if again is not None and (found is None or again.weighed < found.weighed):
            found = again
    return None if found is None else found.findings


class _Found(NamedTuple):
    """Findings with the weighed seconds of the best, and the least weighed seconds by closed forms."""

    findings: Findings
    weighed: float
    promised: float

    @property
    def is_as_promised(self) -> bool:
        return self.weighed <= (1 + _NEAR) * self.promised


def _find_within(question: Question, searched: Question, tally: Tally) -> _Found | None:
    search = Search(searched, tally).run()
    if not search.found:
        return None
    table = Table.of(search.found)
    exact = _accounts(question, table)
    accounts = best_first(exact.values())
    if not accounts:
        return None
    best = accounts[0]
    first = min(accounts, key=lambda each: each.seconds)
    fastest = first if _is_faster(first, best) else None
    others: list[Account] = []
    seen = {kind_of(best.plan)}
    for each in accounts:
        if kind_of(each.plan) not in seen and not any(_is_same(each, other) for other in (best, *others)):
            seen.add(kind_of(each.plan))
            others.append(each)
    findings = Findings(question=question, best=best, others=tuple(others[:_SHOWN]), tally=tally, fastest=fastest)
    return _Found(findings, weighed_seconds(best), search.best)


def weighed_seconds(found: Account) -> float:
    """Return the seconds of a step, times the handicap of a complex plan (`simplicity.py`)."""
    layouts = layouts_of(found.question, found.plan)
    return found.seconds * float(handicap(found.question, layouts)[0])


def sure_seconds(found: Account) -> float:
    """Return the seconds of a step, times the factor for doubts (`simplicity.py`). Speeds are compared by these."""
    return found.seconds * float(doubt(found.question, layouts_of(found.question, found.plan))[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """All candidates that fit, with a column for each choice."""

    found: list[Fitting]
    columns: Mapping[str, np.ndarray]
    seconds: Floats
    sure: Floats
    weighed: Floats

    @staticmethod
    def of(found: list[Fitting]) -> "Table":
        layouts = joined([each.layouts for each in found])
        columns = {each.name: getattr(layouts, each.name) for each in fields(layouts)}
        columns["precision"] = np.concatenate([np.full(len(each.seconds), each.precision) for each in found])
        return Table(
            found=found,
            columns=columns,
            seconds=np.concatenate([each.seconds for each in found]),
            sure=np.concatenate([each.sure for each in found]),
            weighed=np.concatenate([each.weighed for each in found]),
        )

    def plan(self, question: Question, row: int) -> Plan:
        """Return the plan of one row."""
        value = {name: column[row] for name, column in self.columns.items()}
        pp, share = int(value["pp"]), float(value["recompute_share"])
        per_rank = -(-question.model.num_layers // pp)
        schedule = SCHEDULES[int(value["schedule"])] if pp > 1 else "1f1b"
        recompute = RECOMPUTE[int(value["recompute"])]
        return Plan(
            dp=int(value["dp"]), tp=int(value["tp"]), pp=pp, cp=int(value["cp"]), ep=int(value["ep"]),
            sp=bool(value["sequence_parallel"]), context=CONTEXT[int(value["context"])],
            chunks=int(value["chunks"]) if schedule in ("interleaved", "looped-bfs", "hanayo") else None,
            schedule=schedule, microbatches=int(value["num_microbatches"]), zero=int(value["zero"]),
            zero_group=int(value["zero_group"]) or None, recompute=recompute,
            recompute_layers=max(round(share * per_rank), 1) if share < 1 and recompute != "none" else None,
            offload=Offload(
                optimizer=float(value["offload_optimizer"]), parameters=float(value["offload_parameters"]),
                activations=float(value["offload_activations"]),
            ),
            precision=str(value["precision"]), order=ORDERS[int(value["order"])], layers=question.fixed.get("layers"),
        )  # fmt: skip

    def shapes(self) -> np.ndarray:
        """Return a number for the grid and the schedule of each row."""
        columns = [self.columns[name] for name in ("dp", "tp", "pp", "cp", "ep", "schedule")]
        _, shapes = np.unique(np.stack(columns), axis=1, return_inverse=True)
        return np.asarray(shapes.ravel())

    def of_kinds(self) -> list[int]:
        """Return the best row of each kind, the best first."""
        kinds = _codes(self.columns, (("tp", 1), ("pp", 1), ("cp", 1), ("ep", 1), ("zero", 2), ("recompute", 0)))
        order = np.argsort(self.weighed, kind="stable")
        _, first = np.unique(kinds[order], return_index=True)
        return [int(order[place]) for place in np.sort(first)]


def _codes(columns: Mapping[str, np.ndarray], above: tuple[tuple[str, int], ...]) -> np.ndarray:
    """Return one number for each row: a bit for each column that is above its value."""
    return np.asarray(sum((columns[name] > value).astype(np.int64) << bit for bit, (name, value) in enumerate(above)))


def _accounts(question: Question, table: Table) -> dict[int, Account]:
    """Return exact accounts by row: of the best, the fastest, and the best of each kind, whether they fit or not."""
    accounts = _first_accounts(question, table)
    for row in np.argsort(table.seconds, kind="stable")[:_FASTEST]:
        if row not in accounts:
            accounts[int(row)] = _account(question, table, int(row))
    num_fitting = 0
    for row in table.of_kinds()[:_MOST_KINDS]:
        if num_fitting > _OTHER_KINDS:
            break
        if row not in accounts:
            accounts[row] = _account(question, table, row)
        num_fitting += accounts[row].fits
    return accounts


def best_first(accounts: Iterable[Account]) -> list[Account]:
    """Return those that fit exactly: first the simplest of those as fast as the fastest, then by weighed seconds."""
    fitting = sorted((each for each in accounts if each.fits), key=weighed_seconds)
    if not fitting:
        return []
    least = min(map(sure_seconds, fitting))
    best = next(each for each in fitting if sure_seconds(each) <= (1 + BAND) * least)
    return [best, *(each for each in fitting if each is not best)]


def _first_accounts(question: Question, table: Table) -> dict[int, Account]:
    """Account for the fastest by closed forms, then for the simplest that are as fast, until none can be simpler."""
    accounts: dict[int, Account] = {}
    shapes, chunks = table.shapes(), table.columns["chunks"]

    def look(order: np.ndarray, is_enough: Callable[[int, list[Account]], bool]) -> list[Account]:
        fitting: list[Account] = []
        seen: set[tuple[int, int]] = set()
        tried: Counter[tuple[int, int]] = Counter()
        for row in map(int, order):
            if is_enough(row, fitting) or tried.total() >= (_MOST if fitting else _MOST_TRIED):
                break
            shape = int(shapes[row]), int(chunks[row])
            if shape in seen or tried[shape] >= _OF_ONE:
                continue
            if row not in accounts:
                accounts[row] = _account(question, table, row)
            tried[shape] += 1
            if accounts[row].fits:
                seen.add(shape)
                fitting.append(accounts[row])
        return fitting

    first = look(np.argsort(table.sure, kind="stable"), lambda _, fitting: len(fitting) >= _FASTEST)
    if first:
        limit = (1 + BAND) * min(map(sure_seconds, first))
        near = np.flatnonzero(table.sure <= limit)
        least = min(weighed_seconds(each) for each in first if sure_seconds(each) <= limit)

        def is_enough(row: int, fitting: list[Account]) -> bool:
            best = min((weighed_seconds(each) for each in fitting if sure_seconds(each) <= limit), default=np.inf)
            return len(fitting) >= _BEST and table.weighed[row] >= min(best, least)

        look(near[np.argsort(table.weighed[near], kind="stable")], is_enough)
    return accounts


def _account(question: Question, table: Table, row: int) -> Account:
    return with_layers(account(question, table.plan(question, row)))


def with_layers(found: Account) -> Account:
    """Return the account with the layers of stages in its plan, if their numbers differ."""
    return replace(found, plan=replace(found.plan, layers=found.layers if len(set(found.layers)) > 1 else None))


def _is_faster(one: Account, other: Account) -> bool:
    return one.seconds < (1.0 - _SAME) * other.seconds


def _is_same(one: Account, other: Account) -> bool:
    seconds, held = one.seconds / other.seconds - 1.0, one.fullest.total / other.fullest.total - 1.0
    return abs(seconds) < _SAME and abs(held) < _SAME
