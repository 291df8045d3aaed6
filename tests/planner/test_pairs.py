"""Every pair of choices: it is no plan at all, or it composes, or it is refused with a plan that composes."""

from itertools import combinations

import pytest

from shardwise.errors import ShardwiseError
from shardwise.planner.composition import RULES, check_composition, composes, nearest_plan
from shardwise.planner.plan import Plan
from shardwise.schedule.catalogue import CATALOGUE

CHOICES = [
    "dp=2",
    "tp=2",
    "pp=2",
    "cp=2",
    "dp=2,ep=2",
    "cp=2,ep=2",
    "tp=2,sp=true",
    "cp=2,context=all-to-all",
    *(f"dp=2,zero={stage}" for stage in (1, 2, 3)),
    "dp=4,zero=3,zero_group=2",
    "zero=1",
    "microbatches=4",
    "recompute=full",
    "recompute=selective",
    "precision=bf16",
    "precision=fp16",
    *(f"offload.{what}=0.5" for what in ("optimizer", "parameters", "activations")),
    "pp=2,layers=1+2",
    "pp=2,schedule=auto,chunks=3",
    *(f"pp=2,schedule={name},microbatches=4" for name in (*CATALOGUE, "auto")),
]


def joined(one: str, other: str) -> str:
    """Both choices; where they speak of the same key, the first has the word."""
    words = dict(part.split("=") for part in f"{other},{one}".split(","))
    return ",".join(f"{key}={value}" for key, value in words.items())


def test_a_pair_that_is_refused_is_refused_with_a_sentence_and_a_plan_that_runs() -> None:
    seen: set[str] = set()
    for one, other in combinations(CHOICES, 2):
        try:
            plan = Plan.parse(joined(one, other))
        except ShardwiseError:
            continue  # It says so itself.
        if composes(plan):
            check_composition(plan)
            continue
        seen |= {rule.name for rule in RULES if rule.applies(plan)}
        with pytest.raises(ShardwiseError) as caught:
            check_composition(plan)
        assert caught.value.remedy == str(nearest_plan(plan))
        assert composes(Plan.parse(caught.value.remedy))
        assert caught.value.problem
        assert "\n" not in caught.value.problem
    assert {"zero without replicas", "activations that are recomputed"} <= seen
