"""What a search gives back: the best plan, the next few that differ in kind, and what fell to what."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from shardwise.cost.layouts import CONTEXT, ORDERS, RECOMPUTE
from shardwise.cost.memory import SPARE, SPREAD
from shardwise.cost.numbers import Floats
from shardwise.cost.pipeline import SCHEDULES
from shardwise.planner.account import Account, account
from shardwise.planner.plan import Offload, Plan
from shardwise.planner.question import Question
from shardwise.planner.search.choices import joined
from shardwise.planner.search.nowhere import nowhere
from shardwise.planner.search.reasons import with_reasons
from shardwise.planner.search.search import Fitting, Search
from shardwise.planner.search.tally import Tally
from shardwise.schedule.catalogue import CATALOGUE

# Of the best by closed forms at least so many, and at most so many, are accounted for exactly; and of other kinds so
# many that fit exactly, of so many at most.
_BEST, _MOST = 3, 8
_OTHER_KINDS, _MOST_KINDS = 5, 12
_SHOWN = 4
# Plans as fast and as large as each other, to this, are one and the same to whoever chooses.
_SAME = 1e-3
# No prediction is good to this: of plans that are within it of the fastest, the simplest is chosen.
_CLOSE = 0.03
# Of the simplest within it so many are accounted for exactly.
_SIMPLEST = 4
# How far schedules are from plain; those that are not named are further than all of these.
_PLAINNESS = {"1f1b": 0, "gpipe": 1, "interleaved": 1, "looped-bfs": 2, "zb-h1": 2}
_PLAIN = np.array([_PLAINNESS.get(name, 3) + 2 * (CATALOGUE[name].num_weight_copies > 1) for name in SCHEDULES])


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The best plan with its reasons, others from near to far, and the search's record."""

    question: Question
    best: Account
    others: tuple[Account, ...]
    tally: Tally
    #: What is predicted to be faster than the best, by less than can be told.
    fastest: Account | None = None

    @property
    def plan(self) -> Plan:
        return self.best.plan


def kind_of(plan: Plan) -> tuple[bool, ...]:
    """What makes two plans differ in kind: which axes are used at all, and by what room is made."""
    axes = (plan.tp > 1, plan.pp > 1, plan.cp > 1, plan.ep > 1)
    return (*axes, plan.zero == 3, plan.recompute != "none", plan.offload != Offload())


def find_plan(question: Question) -> Findings:
    """Search, and account for the best exactly. A model that fits nowhere is an error that says what it would take."""
    tally = Tally()
    found = find_plan_if_any(question, tally)
    if found is None:
        raise nowhere(question, tally)
    return found


def find_plan_if_any(question: Question, tally: Tally) -> Findings | None:
    """The same, or None. `tally` is told what fell to what.

    A plan leaves as much memory free as our predictions are off. If none does, one that just fits is better than none.
    """
    if question.device.architecture == "cpu" or question.reserve:
        return _find(question, tally)
    careful = Tally()
    found = _find(replace(question, reserve=float(np.expm1(SPARE * SPREAD))), careful)
    return _find(question, tally) if found is None else replace(found, question=question)


def _find(question: Question, tally: Tally) -> Findings | None:
    search = Search(question, tally).run()
    if not search.found:
        return None
    table = Table.of(search.found)
    accounts = _accounts(question, table)
    if not accounts:
        return None
    best = simplest_of_the_fastest(accounts)
    fastest = accounts[0] if accounts[0].plan != best.plan else None
    others: list[Account] = []
    seen = {kind_of(best.plan)}
    for each in accounts:
        if kind_of(each.plan) not in seen and not any(_is_same(each, other) for other in (best, *others)):
            seen.add(kind_of(each.plan))
            others.append(each)
    explained = with_reasons(best, table.seconds, table.columns, table.parts)
    return Findings(question=question, best=explained, others=tuple(others[:_SHOWN]), tally=tally, fastest=fastest)


def simplest_of_the_fastest(accounts: list[Account]) -> Account:
    """Of those that are as fast as can be told, the one with fewest axes, then with least out of the ordinary."""
    near = [each for each in accounts if each.seconds <= (1 + _CLOSE) * accounts[0].seconds]
    return min(near, key=lambda each: (*_complexity(each.plan), each.seconds))


def _complexity(plan: Plan) -> tuple[int, int]:
    on_host = plan.offload != Offload()
    axes = sum(size > 1 for size in (plan.tp, plan.pp, plan.cp, plan.ep)) + on_host
    others = (plan.zero == 3, plan.zero_group is not None, plan.recompute != "none", plan.order != ORDERS[0])
    return axes, int(_PLAIN[SCHEDULES.index(plan.schedule)]) + sum(others) + (plan.recompute_layers is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """All candidates that fit, with what tells plans apart as columns."""

    found: list[Fitting]
    columns: Mapping[str, np.ndarray]
    seconds: Floats
    parts: Mapping[str, Floats]
    where: np.ndarray

    @staticmethod
    def of(found: list[Fitting]) -> "Table":
        layouts = joined([each.layouts for each in found])
        columns = {each.name: getattr(layouts, each.name) for each in fields(layouts)}
        columns["precision"] = np.concatenate([np.full(len(each.seconds), each.precision) for each in found])
        return Table(
            found=found,
            columns=columns,
            seconds=np.concatenate([each.seconds for each in found]),
            parts={name: np.concatenate([each.parts[name] for each in found]) for name in found[0].parts},
            where=np.concatenate([[0], np.cumsum([len(each.seconds) for each in found])]),
        )

    def plan(self, question: Question, row: int) -> Plan:
        """The plan of one row."""
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

    def in_order(self) -> Iterator[int]:
        """The best row of each different grid and schedule, the fastest first."""
        columns = self.columns
        shapes: set[tuple[int, ...]] = set()
        for row in np.argsort(self.seconds, kind="stable"):
            shape = tuple(int(columns[name][row]) for name in ("dp", "tp", "pp", "cp", "ep", "schedule", "chunks"))
            if shape not in shapes:
                shapes.add(shape)
                yield int(row)

    def simplest(self) -> list[int]:
        """The simplest rows of those that are as fast as can be told, the fastest of each simplicity."""
        near = np.flatnonzero(self.seconds <= (1 + _CLOSE) * self.seconds.min())
        of = {name: self.columns[name][near] for name in self.columns}
        on_host = (of["offload_optimizer"] > 0) | (of["offload_parameters"] > 0) | (of["offload_activations"] > 0)
        axes = sum((of[name] > 1).astype(np.int64) for name in ("tp", "pp", "cp", "ep")) + on_host
        odd = np.where(of["pp"] > 1, _PLAIN[of["schedule"]], 0) + (of["zero"] == 3) + (of["zero_group"] > 0)
        odd = odd + (of["recompute"] > 0) * (1 + (of["recompute_share"] < 1)) + (of["order"] > 0)
        return [int(near[row]) for row in np.lexsort((self.seconds[near], odd, axes))[:_SIMPLEST]]

    def of_kinds(self) -> list[int]:
        """The best row of each kind, the fastest first."""
        kinds = _codes(self.columns, (("tp", 1), ("pp", 1), ("cp", 1), ("ep", 1), ("zero", 2), ("recompute", 0)))
        order = np.argsort(self.seconds, kind="stable")
        _, first = np.unique(kinds[order], return_index=True)
        return [int(order[place]) for place in np.sort(first)]


def _codes(columns: Mapping[str, np.ndarray], above: tuple[tuple[str, int], ...]) -> np.ndarray:
    """One number for each row: which of some columns are above a value."""
    return np.asarray(sum((columns[name] > value).astype(np.int64) << bit for bit, (name, value) in enumerate(above)))


def _accounts(question: Question, table: Table) -> list[Account]:
    """The best that fit exactly, the fastest first: until no closed form promises a faster one; and one of a kind."""
    accounts: dict[int, Account] = {}
    best = np.inf
    for number, row in enumerate(table.in_order()):
        if number >= _MOST or (number >= _BEST and table.seconds[row] >= best):
            break
        accounts[row] = _account(question, table, row)
        if accounts[row].fits:
            best = min(best, accounts[row].seconds)
    for row in table.simplest():
        if row not in accounts:
            accounts[row] = _account(question, table, row)
    num_fitting = 0
    for row in table.of_kinds()[:_MOST_KINDS]:
        if num_fitting > _OTHER_KINDS:
            break
        if row not in accounts:
            accounts[row] = _account(question, table, row)
        num_fitting += accounts[row].fits
    return sorted((each for each in accounts.values() if each.fits), key=lambda each: each.seconds)


def _account(question: Question, table: Table, row: int) -> Account:
    found = account(question, table.plan(question, row))
    # Layers are said where stages have different numbers of them.
    return replace(found, plan=replace(found.plan, layers=found.layers if len(set(found.layers)) > 1 else None))


def _is_same(one: Account, other: Account) -> bool:
    seconds, held = one.seconds / other.seconds - 1.0, one.fullest.total / other.fullest.total - 1.0
    return abs(seconds) < _SAME and abs(held) < _SAME
