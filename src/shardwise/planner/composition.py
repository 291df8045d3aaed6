"""One table of choices that cannot be combined. Engines check it before they launch; the planner obeys it.

Everything else can be combined. Each rule says when it applies, what is wrong, and the nearest plan that can run.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.schedule.catalogue import CATALOGUE

_MOST_CHUNKS_OF_AUTO = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A kind of plan that cannot run: its name, a test, the problem, and a similar plan that can run."""

    name: str
    applies: Callable[[Plan], bool]
    problem: Callable[[Plan], str]
    instead: Callable[[Plan], Plan]


def _may_split_backward(plan: Plan) -> bool:
    return plan.pp > 1 and (plan.schedule == "auto" or CATALOGUE[plan.schedule].splits_backward)


def _is_stale(plan: Plan) -> bool:
    return plan.schedule == "pipedream-2bw"


def _holds_twice(plan: Plan) -> bool:
    return plan.schedule in CATALOGUE and CATALOGUE[plan.schedule].num_weight_copies > 1


RULES: tuple[Rule, ...] = (
    Rule(
        name="zero without replicas",
        applies=lambda plan: plan.zero > 0 and plan.dp * plan.cp == 1,
        problem=lambda plan: f"zero={plan.zero} shards states over replicas, but with dp=1 and cp=1 there is only one",
        instead=lambda plan: replace(plan, zero=0, zero_group=None),
    ),
    Rule(
        name="two weight versions under ZeRO",
        applies=lambda plan: _is_stale(plan) and plan.zero > 0,
        problem=lambda plan: (
            "schedule=pipedream-2bw steps on two versions of the weights in turn, and with"
            f" zero={plan.zero} a rank updates its shard of one"
        ),
        instead=lambda plan: replace(plan, schedule="1f1b"),
    ),
    Rule(
        name="weights twice on the host",
        applies=lambda plan: plan.offload.parameters > 0 and (_is_stale(plan) or _holds_twice(plan)),
        problem=lambda plan: (
            f"schedule={plan.schedule} keeps two {'versions' if _is_stale(plan) else 'copies'} of each weight,"
            f" but offload.parameters={plan.offload.parameters:g} stores only one on the host"
        ),
        instead=lambda plan: replace(plan, schedule="1f1b", chunks=None, layers=None),
    ),
    Rule(
        name="recomputation of some layers",
        applies=lambda plan: plan.recompute_layers is not None and _may_split_backward(plan),
        problem=lambda plan: (
            f"schedule={plan.schedule} runs backwards in two halves and recomputes a stage at once, not"
            f" recompute_layers={plan.recompute_layers} of it"
        ),
        instead=lambda plan: replace(plan, recompute_layers=None),
    ),
    Rule(
        name="activations that are recomputed",
        applies=lambda plan: plan.recompute != "none" and plan.offload.activations > 0,
        problem=lambda plan: (
            f"recompute={plan.recompute} keeps little of what offload.activations={plan.offload.activations:g} would"
            " move, and the engine does one or the other"
        ),
        instead=lambda plan: replace(plan, offload=replace(plan.offload, activations=0.0)),
    ),
    Rule(
        name="many chunks of auto",
        applies=lambda plan: plan.schedule == "auto" and (plan.chunks or 0) > _MOST_CHUNKS_OF_AUTO,
        problem=lambda plan: f"schedule=auto makes 1 or {_MOST_CHUNKS_OF_AUTO} chunks on a rank, not {plan.chunks}",
        instead=lambda plan: replace(plan, chunks=_MOST_CHUNKS_OF_AUTO),
    ),
    Rule(
        name="layers of auto",
        applies=lambda plan: plan.schedule == "auto" and plan.layers is not None and not _fits_auto(plan),
        problem=lambda plan: (
            f"layers is for {len(plan.layers or ())} stages, but schedule=auto over pp={plan.pp} makes "
            f"{' or '.join(map(str, _counts_of_auto(plan)))}"
        ),
        instead=lambda plan: replace(plan, layers=None),
    ),
)


def check_composition(plan: Plan) -> None:
    """Raise an error for a valid plan that cannot run, with the nearest one that can as its remedy."""
    for rule in RULES:
        if rule.applies(plan):
            raise ShardwiseError(rule.problem(plan), remedy=str(nearest_plan(plan)))


def composes(plan: Plan) -> bool:
    """Return whether the engines can run a plan."""
    return not any(rule.applies(plan) for rule in RULES)


def nearest_plan(plan: Plan) -> Plan:
    """Return the plan, or the nearest one that can run."""
    for rule in RULES:
        if rule.applies(plan):
            plan = rule.instead(plan)
    assert composes(plan), f"no rule may lead to what another refuses: {plan}"
    return plan


def _counts_of_auto(plan: Plan) -> list[int]:
    return [plan.pp * chunks for chunks in range(1, (plan.chunks or _MOST_CHUNKS_OF_AUTO) + 1)]


def _fits_auto(plan: Plan) -> bool:
    return len(plan.layers or ()) in _counts_of_auto(plan)
