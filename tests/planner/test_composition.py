"""What composes, and the nearest plan to one that does not."""

import pytest

from shardwise.errors import ShardwiseError
from shardwise.planner.composition import RULES, check_composition, composes, nearest_plan
from shardwise.planner.plan import Plan
from tests.planner.refused import REFUSED


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
    broken = Plan.parse("pp=2,zero=3,precision=fp16,recompute=selective,offload.optimizer=0.5,offload.activations=1")
    assert nearest_plan(broken) == Plan.parse("pp=2,precision=fp16,recompute=selective,offload.optimizer=0.5")
    check_composition(nearest_plan(broken))
