"""The reasons for a plan: each choice compared with the best candidate that differs in it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shardwise.cost.layouts import CONTEXT, ORDERS, RECOMPUTE
from shardwise.cost.numbers import Floats
from shardwise.cost.pipeline import SCHEDULES
from shardwise.planner.account import Account, hold
from shardwise.planner.plan import AXES, Plan
from shardwise.units import format_bytes, format_percent, format_seconds

#: Keys of a plan in the order in which they are explained, and the column of each.
_KEYS = {
    **{axis: axis for axis in AXES},
    "sp": "sequence_parallel",
    "schedule": "schedule",
    "microbatches": "num_microbatches",
    **{key: key for key in ("zero", "recompute", "precision", "order")},
}
_OFFLOADS = ("offload.optimizer", "offload.parameters", "offload.activations")
_WORDS = {"schedule": SCHEDULES, "recompute": RECOMPUTE, "context": CONTEXT, "order": ORDERS}
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


def with_reasons(
    best: Account, exact: Mapping[int, Account], seconds: Floats, weighed: Floats, columns: Mapping[str, np.ndarray],
    parts: Mapping[str, Floats],
) -> Account:  # fmt: skip
    """Return the account with a reason for each choice of its plan. The columns are those of all candidates that fit.
    The rival is the best of those that chose otherwise, by weighed seconds. If it has an exact account, exact seconds
    are compared, so that the answer shows the same figure everywhere."""
    row = _row_of(best.plan, seconds, columns)
    reasons = {}
    for key, column in _KEYS.items():
        rival = _rival(columns[column], row, weighed)
        if rival is not None and rival in exact:
            pair = best, exact[rival]
            compared = [each.seconds for each in pair], {part: [each.parts[part] for each in pair] for part in parts}
        else:
            rows = [row, row if rival is None else rival]
            compared = seconds[rows].tolist(), {part: each[rows].tolist() for part, each in parts.items()}
        is_simpler = rival is not None and bool(weighed[row] < weighed[rival])
        why = _reason(key, columns[column], row, rival, *compared, is_simpler=is_simpler)
        if why is not None:
            reasons[key] = why
    reasons |= _making_room(best)
    plan = best.plan
    reasons |= {key: "decided beforehand" for key in best.question.fixed if key in _KEYS or key == "layers"}
    reasons["dp"] = f"what tp={plan.tp}, pp={plan.pp} and cp={plan.cp} leave of {plan.num_ranks} devices"
    if plan.layers is not None and "layers" not in reasons:
        reasons["layers"] = "embedding and head weigh as much as layers do, and layers do not divide evenly"
    ordered = {key: reasons[key] for key in (*_KEYS, "layers", *_OFFLOADS) if key in reasons}
    return replace(best, plan=replace(plan, reasons=ordered))


def _making_room(best: Account) -> dict[str, str]:
    """Return the choices without which the plan would not fit, with how much memory would be missing."""
    plan, reasons = best.plan, {}
    changes: dict[str, dict[str, Any]] = {}
    if plan.zero > 0:
        changes["zero"] = {"zero": plan.zero - 1, "zero_group": plan.zero_group if plan.zero > 1 else None}
    if plan.recompute != "none":
        changes["recompute"] = {"recompute": "none", "recompute_layers": None}
    if plan.sp:
        changes["sp"] = {"sp": False}
    for name in ("optimizer", "parameters", "activations"):
        if getattr(plan.offload, name):
            changes[f"offload.{name}"] = {"offload": replace(plan.offload, **{name: 0.0})}
    for key, changed in changes.items():
        without = replace(plan, **changed)
        held = hold(best.question, without)
        fullest = min(held, key=lambda rank: rank.headroom)
        if fullest.total > best.question.room:
            before = 0 if key.startswith("offload.") else str(changed[key]).lower()
            left = fullest.headroom
            short = f"{format_bytes(-left)} more than there is" if left < 0 else f"which leaves {format_bytes(left)}"
            reasons[key] = f"{key}={before} needs {format_bytes(fullest.total)} on stage {fullest.place}, {short}"
    return reasons


def _row_of(plan: Plan, seconds: Floats, columns: Mapping[str, np.ndarray]) -> int:
    """Return the row of the candidate that became the plan."""
    same = np.ones(len(seconds), dtype=bool)
    for key, column in _KEYS.items():
        value = getattr(plan, key)
        same &= columns[column] == (_WORDS[key].index(value) if key in _WORDS else value)
    assert same.any(), f"{plan} is none of the candidates"
    return int(np.flatnonzero(same)[seconds[same].argmin()])


def _rival(column: np.ndarray, row: int, weighed: Floats) -> int | None:
    """Return the row of the best candidate that chose otherwise; None if there is none."""
    others = np.flatnonzero(column != column[row])
    return int(others[weighed[others].argmin()]) if len(others) else None


def _reason(
    key: str, column: np.ndarray, row: int, rival: int | None, seconds: Sequence[float],
    parts: Mapping[str, Sequence[float]], *, is_simpler: bool,
) -> str | None:  # fmt: skip
    """Return the reason. Seconds and parts are those of the plan and its rival; `is_simpler` is about the plan."""
    if rival is None:
        return None if _is_plain(key, column[row]) else "no other value fits, or comes near"
    longer = seconds[1] / seconds[0] - 1.0
    name = _named(key, column[rival])
    if longer <= _SAME and _is_plain(key, column[row]):
        return None
    if longer < -_SAME:
        return f"the best with {name} takes {format_percent(-longer)} less, and is less simple"
    if longer <= _SAME:
        return f"the best with {name} takes as long{', and is less simple' if is_simpler else ''}"
    more = {part: each[1] - each[0] for part, each in parts.items()}
    grown = max(more, key=lambda part: more[part])
    return (
        f"the best with {name} takes {format_percent(longer)} longer, most of it {PART_WORDS[grown]} "
        f"(+{format_seconds(more[grown])})"
    )


def _named(key: str, value: object) -> str:
    if key in _WORDS:
        return f"{key}={_WORDS[key][int(value)]}"  # type: ignore[call-overload]
    return f"{key}={str(value).lower()}"


def _is_plain(key: str, value: object) -> bool:
    """Whether a choice is the same as on one device, so that it needs no reason."""
    return bool(value == {"dp": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "microbatches": 1}.get(key, 0))
