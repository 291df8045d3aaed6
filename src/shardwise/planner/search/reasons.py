"""The reasons for a plan: each choice compared with the plan that differs in it alone (`neighbours.py`).

Such plans are priced for this, because the search rejects most of them by bounds. If another size of an axis does not
fit, the reason also says what a plan with that size takes that saves memory elsewhere.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from shardwise.cost.step import HOST_TAKEN
from shardwise.planner.account import Account, RankBytes, account, ends_of, hold
from shardwise.planner.plan import AXES, Plan
from shardwise.planner.question import Question
from shardwise.planner.search.neighbours import Around, Candidate, Neighbour, leaner, price_plans
from shardwise.units import counted, format_bytes, format_percent, format_seconds

# Keys of a plan in the order in which they are explained.
_KEYS = (
    *AXES, "sp", "context", "schedule", "chunks", "microbatches", "zero", "zero_group", "recompute", "recompute_layers",
    "precision", "order", "layers", "offload.optimizer", "offload.parameters", "offload.activations",
)  # fmt: skip
#: Descriptions of the parts of a step.
PART_WORDS = {
    "compute": "compute",
    "recompute": "recomputation",
    "tp": "tensor parallel sums",
    "cp": "context parallel exchange",
    "ep": "expert all-to-alls",
    "bubble": "bubble",
    "hops": "hops between stages",
    "dp": "exchange between replicas",
    "optimizer": "optimizer",
    "offload": "copies to the host",
    "other": "everything else",
}
# A difference in seconds below which two plans count as equally fast.
_SAME = 0.005
# The least weight of an end of the model, in layers, that is told.
_FELT = 0.05
# Axes whose other sizes may need other choices to fit.
_SIZES = ("tp", "pp", "cp")
# Values as on one device, which need no reason if others are as fast.
_PLAIN = {**dict.fromkeys((*AXES, "microbatches"), 1), "sp": False, "zero": 0, "recompute": "none"}
_PLAIN |= {"context": "ring", "schedule": "1f1b", "order": "pp-dp-cp-tp"}


def with_reasons(around: Around, shown: Iterable[Account]) -> Account:
    """Return the account with a reason for each choice of its plan. If a neighbour is one of the `shown` accounts,
    exact seconds are compared, so that the answer shows the same figure everywhere."""
    best = around.best
    question, plan = best.question, best.plan
    accounts = {str(_without_layers(question, each.plan)): each for each in shown}
    compare = _Comparison(best, around.itself, accounts)
    reasons = {}
    for key, alike in groupby(
        sorted(around.neighbours, key=lambda each: _KEYS.index(each.key)), key=lambda each: each.key
    ):
        clauses = [compare.clause(each) for each in _told(key, list(alike))]
        reasons[key] = "; ".join(clause for clause in clauses if clause is not None)
    reasons |= {key: "decided beforehand" for key in question.fixed if key in _KEYS and not key.startswith("offload.")}
    reasons["dp"] = f"what tp={plan.tp}, pp={plan.pp} and cp={plan.cp} leave of {counted(plan.num_ranks, 'device')}"
    if plan.layers is not None and "layers" not in reasons:
        reasons["layers"] = _why_uneven(best)
    for name in ("optimizer", "parameters", "activations"):
        if getattr(plan.offload, name):
            without = replace(plan, offload=replace(plan.offload, **{name: 0.0}))
            reasons[f"offload.{name}"] = _lack(best, f"offload.{name}=0", hold(question, without)) or ""
    ordered = {key: reasons[key] for key in _KEYS if reasons.get(key)}
    return replace(best, plan=replace(plan, reasons=ordered))


def _why_uneven(best: Account) -> str:
    """Return why stages have different numbers of layers: what both ends take, and a remainder, if there is one."""
    weights = dict(zip(("embedding", "head"), ends_of(best), strict=True))
    words = [f"the {name} takes as long as {each:.1f} layers" for name, each in weights.items() if each >= _FELT]
    count, stages = sum(best.layers), len(best.layers)
    words += [f"{count} layers do not divide over {stages} stages"] if count % stages else []
    return ", and ".join(words) or "kinds of layers take different times"


def _without_layers(question: Question, plan: Plan) -> Plan:
    return replace(plan, reasons={}, layers=question.fixed.get("layers"))


def _told(key: str, alike: Sequence[Candidate]) -> list[Candidate]:
    """Return the neighbours to name for a key: for each value the best that fits, or else the one with least memory."""
    names = dict.fromkeys(each.name for each in alike)
    found = [min((each for each in alike if each.name == name), key=_fitting_first) for name in names]
    if key != "schedule":
        return found
    # The plain one, and the best of all others.
    plain = [each for each in found if each.plan.schedule == _PLAIN[key]]
    others = [each for each in found if each not in plain and each.fits]
    return [*plain, *sorted(others, key=_fitting_first)[:1]]


def _fitting_first(each: Candidate) -> tuple[bool, float]:
    return not each.fits, each.weighed if each.fits else each.peak


class _Comparison:
    """A plan and its neighbours, in words. Those that have an exact account are compared by it."""

    def __init__(self, best: Account, itself: Candidate, accounts: Mapping[str, Account]) -> None:
        self.best, self.itself, self.accounts = best, itself, accounts

    def clause(self, other: Candidate) -> str | None:
        """Return what a neighbour would cost or lack; None if that is no reason."""
        exact = self._exact(other) if other.fits else self.accounts.get(str(other.plan))
        # Closed forms are a little off: the memory of a neighbour that is near, or does not fit, is computed exactly.
        is_near = exact is None and other.seconds <= (1 + _SAME) * self.itself.seconds
        may_lack = is_near if exact is None else not exact.fits
        lack = None if (other.fits or self._is_slow(other)) and not may_lack else self._lack(other)
        if lack is not None and other.key == "recompute" and self.best.plan.recompute == _PLAIN["recompute"]:
            return None  # More recomputation is for memory, and here it saves none.
        if lack is not None:
            return f"{lack}{self._made_to_fit(other)}"
        if exact is None and not other.fits and not self._is_slow(other):
            exact = account(self.best.question, other.plan)
        longer, grown = self._longer(other, exact)
        if abs(longer) <= _SAME and getattr(self.best.plan, other.key) == _PLAIN.get(other.key):
            return None
        if abs(longer) <= _SAME and other.key in ("schedule", "chunks"):
            return None  # There are many that are as fast.
        simpler = ", and is less simple" if self.itself.handicap < other.handicap else ""
        words = f"{other.name} {_in_time(longer)}{grown if longer > _SAME else simpler}"
        least = self._least_found(other)
        return words if least >= longer - _SAME else f"{words}, and the best with it {_in_time(least)}"

    def _exact(self, other: Candidate) -> Account | None:
        """Return the account of a neighbour: one that is shown; or a new one if it is said to be faster, or if its
        pipeline is another. For pipelines closed forms may be off by much: layers are whole, stages have one each."""
        shown = self.accounts.get(str(other.plan))
        if shown is not None or self._is_slow(other):
            return shown
        plan, best = other.plan, self.best.plan
        is_another = plan.pp > 1 and (plan.pp, plan.schedule, plan.chunks) != (best.pp, best.schedule, best.chunks)
        is_faster = other.seconds < (1 - _SAME) * self.itself.seconds
        return account(self.best.question, plan) if is_another or is_faster else None

    def _is_slow(self, other: Candidate) -> bool:
        """Return whether this is a slower precision, for which time is the reason, not memory."""
        return other.key == "precision" and other.seconds > (1 + _SAME) * self.itself.seconds

    def _longer(self, other: Candidate, exact: Account | None) -> tuple[float, str]:
        """Return by what share a neighbour takes longer, and which part of its step grew most."""
        before: Candidate | Account = self.itself if exact is None else self.best
        after: Candidate | Account = other if exact is None else exact
        more = {part: after.parts[part] - before.parts[part] for part in before.parts}
        part = max(more, key=lambda part: more[part])
        return after.seconds / before.seconds - 1.0, f", most of it {PART_WORDS[part]} (+{format_seconds(more[part])})"

    def _made_to_fit(self, other: Candidate) -> str:
        """Return how long a step takes with another size of an axis and less memory elsewhere."""
        if other.key not in _SIZES:
            return ""
        variants = price_plans(self.best.question, leaner(self.best.question, Neighbour(*other[:3])))
        nearest = min((each for each in variants if each.fits), key=lambda each: each.weighed, default=None)
        longer = np.inf if nearest is None else self._longer(nearest, self._exact(nearest))[0]
        least = self._least_found(other)
        if least < longer:
            return f", and the best with it {_in_time(least)}"
        return "" if nearest is None else f", and {_in_time(longer)} with {nearest.name}"

    def _least_found(self, other: Candidate) -> float:
        """Return by what share the fastest account that is shown takes longer, of those with this size and offload."""
        if other.key not in _SIZES:
            return np.inf
        found = [
            each.seconds / self.best.seconds - 1.0
            for each in self.accounts.values()
            if getattr(each.plan, other.key) == getattr(other.plan, other.key)
            and each.plan.offload == self.best.plan.offload
        ]
        return min(found, default=np.inf)

    def _lack(self, other: Candidate) -> str | None:
        """Return how much memory a neighbour lacks; None if it fits."""
        question = self.best.question
        node = question.cluster.pools[0].node
        on_host, room = other.host * node.devices_per_node, HOST_TAKEN * node.host.memory_bytes
        if on_host > room:
            needs = f"{other.name} needs {format_bytes(on_host)} on the host of a node"
            return f"{needs}, which has room for {format_bytes(room)}"
        plan, best = other.plan, self.best.plan
        if (plan.pp, plan.num_stages) == (best.pp, best.num_stages):
            plan = replace(plan, layers=self.best.layers)  # The same stages: dealing layers out takes longest.
        return _lack(self.best, other.name, hold(question, plan))


def _in_time(longer: float) -> str:
    if abs(longer) <= _SAME:
        return "takes as long"
    if longer > 1.0:
        return f"takes {1.0 + longer:.2g} x as long"
    return f"takes {format_percent(abs(longer))} {'longer' if longer > 0 else 'less'}"


def _lack(best: Account, name: str, held: Sequence[RankBytes]) -> str | None:
    fullest = min(held, key=lambda rank: rank.headroom)
    room, left = best.question.room, fullest.headroom
    if fullest.total <= room:
        return None
    needs = f"{name} needs {format_bytes(fullest.total)} on stage {fullest.place}"
    if left < 0:
        return f"{needs}, {format_bytes(-left)} more than there is"
    return f"{needs}, and leaves {format_bytes(left)} of the {format_bytes(fullest.capacity - room)} kept in reserve"
