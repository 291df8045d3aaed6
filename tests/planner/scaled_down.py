"""A plan for thousands of devices as one for a few processes: the same kinds of axes and choices, in small numbers."""

from dataclasses import replace

from shardwise.errors import ShardwiseError
from shardwise.parity.check import check
from shardwise.parity.models import default_settings, named_settings, problem_of
from shardwise.parity.verdict import Verdict
from shardwise.planner.plan import Plan
from shardwise.schedule.catalogue import CATALOGUE
from tests.crowd import Crowds

_MOST_RANKS = 8
_MICROBATCHES = 4


def scaled_down(plan: Plan) -> Plan:
    """The plan with two ranks along each axis that it uses, eight in all at most, and as few stages and microbatches as
    its schedule can have. Layers that were dealt out unevenly still are."""
    dp, tp, pp, cp = (min(size, 2) for size in (plan.dp, plan.tp, plan.pp, plan.cp))
    if dp * tp * pp * cp > _MOST_RANKS:
        dp = 1  # Context parallel ranks are replicas too.
    in_groups = plan.zero_group is not None and plan.dp > 2 and 4 * tp * pp <= _MOST_RANKS and cp == 1
    dp = 4 if in_groups else dp
    replicas = dp * cp
    chunks = None if plan.chunks is None else 2
    small = replace(
        plan, dp=dp, tp=tp, pp=pp, cp=cp, ep=min(plan.ep, replicas, 2), chunks=chunks, layers=None,
        zero=plan.zero if replicas > 1 else 0, zero_group=2 if in_groups else None,
        microbatches=_microbatches(plan, pp), reasons={},
        recompute_layers=None if plan.recompute_layers is None else 1,
    )  # fmt: skip
    stages = small.num_stages or 1
    uneven = plan.layers is not None and stages > 1
    return replace(small, layers=(2, *[1] * (stages - 1))) if uneven else small


def _microbatches(plan: Plan, pp: int) -> int:
    if pp == 1:
        return min(plan.microbatches, 2)
    return max(min(plan.microbatches, _MICROBATCHES), CATALOGUE[plan.schedule].least_microbatches * pp)


def check_small(model: str, plan: Plan, crowds: Crowds) -> Verdict:
    """Train a small model of the same family under a small plan, and on one device."""
    try:
        settings = named_settings(model, plan)
    except ShardwiseError:
        settings = default_settings(plan)  # Of families that are not built here.
    if plan.ep > 1 and settings.mixture is None:
        settings = default_settings(plan)
    make = problem_of(settings, plan, 2)
    return check(plan, make, vocabulary=settings.vocabulary, ranks=crowds.of(plan.num_ranks))
