"""A plan that does not fit, and the cheapest changes that make it fit, each with its price in time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from shardwise.errors import ShardwiseError
from shardwise.planner.account import Account, account, check_question, layouts_of
from shardwise.planner.composition import composes
from shardwise.planner.plan import Plan
from shardwise.planner.question import Question

_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of a plan: its text, the account of the changed plan, and how much slower it is, as a share."""

    words: str
    account: Account
    slower: float


def cheapest_changes(before: Account) -> tuple[Change, ...]:
    """Return the changes that make a plan fit and cost least time: of one key, and of two if too few are found."""
    singles = list(_single(before.plan, before.question))
    found = _that_fit(before, singles)
    if len(found) < _SHOWN:
        pairs = [
            (f"{first} and {second}", plan)
            for (first, one), (second, _) in combinations(singles, 2)
            for words, plan in _single(one, before.question)
            if words == second
        ]
        # Two changes of the same key are the same as the second alone.
        known = {str(plan) for _, plan in singles}
        found += _that_fit(before, [(words, plan) for words, plan in pairs if str(plan) not in known])
    return tuple(sorted(found, key=lambda change: (_leaves(before, change), change.slower))[:_SHOWN])


def _leaves(before: Account, change: Change) -> bool:
    """Return whether a change alters what is offloaded. Such changes are listed after the others."""
    return change.account.plan.offload != before.plan.offload


def _that_fit(before: Account, changed: list[tuple[str, Plan]]) -> list[Change]:
    """Return the first few changes that fit exactly, of those that fit by closed forms, fastest first."""
    question = before.question
    usable = [(words, plan) for words, plan in changed if _is_usable(question, plan)]
    if not usable:
        return []
    found: list[Change] = []
    for precision in {plan.precision for _, plan in usable}:
        mine = [(words, plan) for words, plan in usable if plan.precision == precision]
        layouts = layouts_of(question, *(plan for _, plan in mine))
        priced = question.price(layouts, question.software_in(precision))
        stays = np.array([plan.offload == before.plan.offload for _, plan in mine])
        for row in np.lexsort((priced.seconds, ~stays)):
            words, plan = mine[row]
            if not priced.fits[row] or len(found) >= 2 * _SHOWN or any(plan == each.account.plan for each in found):
                continue
            exact = account(question, plan)
            if exact.fits:
                found.append(Change(words=words, account=exact, slower=exact.seconds / before.seconds - 1.0))
    return found


def _is_usable(question: Question, plan: Plan) -> bool:
    try:
        check_question(question, plan)
    except ShardwiseError:
        return False
    return composes(plan) or not question.runnable


def _single(plan: Plan, question: Question) -> Iterator[tuple[str, Plan]]:
    """Yield plans with one change that saves memory."""
    for words, changed in _leaner(plan, question):
        try:
            yield words, replace(plan, reasons={}, **changed)
        except ShardwiseError:
            continue


def _leaner(plan: Plan, question: Question) -> Iterator[tuple[str, dict[str, Any]]]:
    narrow = question.precisions[0]
    if plan.precision == "fp32" and narrow != "fp32":
        yield f"precision={narrow}", {"precision": narrow}
    for factor in (2, 4, 8):
        size = plan.ep * factor
        if question.num_experts % size == 0 and plan.dp * plan.cp % size == 0 and question.num_experts > 1:
            yield f"ep={size}", {"ep": size}
    for choice in ("selective", "full"):
        if plan.recompute != choice and plan.recompute != "full":
            yield f"recompute={choice}", {"recompute": choice, "recompute_layers": None}
    if plan.dp * plan.cp > 1:
        for stage in range(plan.zero + 1, 4):
            yield f"zero={stage}", {"zero": stage}
        if plan.zero_group is not None:
            yield "zero over all replicas", {"zero_group": None}
    for factor in (2, 4, 8):
        more = plan.microbatches * factor
        if question.batch % (plan.dp * more) == 0:
            yield f"microbatches={more}", {"microbatches": more}
    for axis in ("tp", "pp", "cp"):
        for factor in (2, 4):
            size = getattr(plan, axis) * factor
            if plan.dp % factor == 0 and _can_cut(question, axis, size):
                changed: dict[str, Any] = {axis: size, "dp": plan.dp // factor, "layers": None}
                changed["microbatches"] = plan.microbatches * factor
                if plan.dp // factor * plan.cp == 1:
                    changed |= {"zero": 0, "zero_group": None}
                yield f"{axis}={size},dp={plan.dp // factor}", changed
    if plan.tp > 1 and not plan.sp:
        yield "sp=true", {"sp": True}
    if plan.pp > 1:
        for schedule in ("1f1b", "v-half", "v-min"):
            if schedule != plan.schedule:
                yield f"schedule={schedule}", {"schedule": schedule, "chunks": None, "layers": None}
    if question.device.architecture == "cpu":
        return  # A CPU's memory is the host's memory.
    if plan.offload.optimizer < 1:
        yield "offload.optimizer=1", {"offload": replace(plan.offload, optimizer=1.0)}
    offloaded = replace(plan.offload, parameters=1.0)
    if plan.offload.parameters < 1 and composes(replace(plan, offload=offloaded)):
        yield "offload.parameters=1", {"offload": offloaded}
    if plan.offload.activations < 1 and plan.recompute == "none":
        yield "offload.activations=1", {"offload": replace(plan.offload, activations=1.0)}


def _can_cut(question: Question, axis: str, size: int) -> bool:
    if axis == "pp":
        return size <= question.model.num_layers
    if axis == "tp":
        return question.cuts_layers and question.heads % size == 0
    return question.cuts_sequences and question.sequence % (2 * size) == 0
