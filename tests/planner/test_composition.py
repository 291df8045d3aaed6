"""What composes, and the nearest plan to one that does not."""

import pytest

from shardwise.errors import ShardwiseError
from shardwise.planner.composition import RULES, check_composition, composes, nearest_plan
from shardwise.planner.plan import Plan

#: One plan for each rule, and what is said.
REFUSED = {
    "zero without replicas": (
        "pp=2,zero=1",
        "zero=1 shares states out over replicas, and dp=1 x cp=1 is one alone",
        "pp=2",
    ),
    "two weight versions on a mesh": (
        "dp=2,pp=2,schedule=pipedream-2bw,microbatches=2",
        "schedule=pipedream-2bw keeps two versions of the weights, which dp=2 does not know of yet",
        "dp=2,pp=2,microbatches=2",
    ),
    "sequence and context parallelism together": (
        "tp=2,cp=2,sp=true",
        "sp=true and cp=2 both cut sequences, and one does not know of the other yet",
        "tp=2,cp=2",
    ),
    "offload": (
        "pp=2,offload.activations=1",
        "offload.activations=1: the engines keep everything on the device yet",
        "pp=2,recompute=full",
    ),
    "selective recomputation": (
        "pp=2,recompute=selective",
        "recompute=selective: the engines recompute all of a stage's forward or nothing yet",
        "pp=2,recompute=full",
    ),
    "fp16": (
        "pp=2,precision=fp16",
        "precision=fp16 needs its loss scaled, which the engines do not do yet",
        "pp=2,precision=bf16",
    ),
    "many chunks of auto": (
        "pp=2,chunks=3,schedule=auto",
        "schedule=auto makes 1 or 2 chunks on a rank, not 3",
        "pp=2,chunks=2,schedule=auto",
    ),
    "layers of auto": (
        "pp=2,schedule=auto,layers=1+1+2",
        "layers is for 3 stages, but schedule=auto over pp=2 makes 2 or 4",
        "pp=2,schedule=auto",
    ),
}


def test_every_rule_has_a_plan_that_it_refuses() -> None:
    assert [rule.name for rule in RULES] == list(REFUSED)
    for rule in RULES:
        assert rule.applies(Plan.parse(REFUSED[rule.name][0]))


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_compose_is_refused_with_the_nearest_that_does(name: str) -> None:
    text, problem, remedy = REFUSED[name]
    with pytest.raises(ShardwiseError) as caught:
        check_composition(Plan.parse(text))
    assert (caught.value.problem, caught.value.remedy) == (problem, remedy)
    assert composes(Plan.parse(remedy))


def test_what_breaks_several_rules_gets_a_plan_that_breaks_none() -> None:
    broken = Plan.parse("pp=2,zero=3,precision=fp16,recompute=selective,offload.optimizer=0.5")
    assert nearest_plan(broken) == Plan.parse("pp=2,precision=bf16,recompute=full")
    check_composition(nearest_plan(broken))
