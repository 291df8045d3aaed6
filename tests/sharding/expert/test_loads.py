"""What routers have counted on all ranks together: the same under every plan, and so are the corrections it makes."""

import pytest
import torch

from shardwise.planner.plan import Plan
from shardwise.ranks.spawn import Ranks
from tests.crowd import Crowds
from tests.sharding.expert import loads

PLANS = (
    # Replicas whose routers have counted differently: reading resets each of them.
    "dp=2",
    "dp=2,ep=2,zero=3",
    "cp=2,ep=2",
    "tp=2,sp=true",
    # A schedule that holds the model twice: each copy of a layer sees half of the microbatches.
    "pp=2,schedule=dualpipe,microbatches=4",
    "pp=2,schedule=zb-v,microbatches=2,recompute=full",
    "dp=2,ep=2,tp=2,zero=1",
    "dp=2,ep=2,pp=2,schedule=dualpipe,microbatches=4,zero=1",
)


@pytest.fixture(scope="module")
def ranks_of(crowds: Crowds) -> dict[int, Ranks]:
    return {number: crowds.of(number) for number in (2, 4)}


@pytest.mark.parametrize("text", [*PLANS[:-2], *(pytest.param(each, marks=pytest.mark.whole) for each in PLANS[-2:])])
def test_loads_and_corrections_are_those_of_one_device(ranks_of: dict[int, Ranks], text: str) -> None:
    plan = Plan.parse(text)
    alone = loads.train(f"dp=1,microbatches={plan.microbatches}", like=text)
    outcomes = ranks_of[plan.num_ranks].run(loads.train, text, timeout_seconds=120)
    for found in outcomes:
        assert found.loads == alone.loads
        assert found.losses == pytest.approx(alone.losses, rel=1e-5)
        for name, each in found.corrections.items():
            assert torch.equal(each, alone.corrections[name]), name
    assert {name for found in outcomes for name in found.corrections} == alone.corrections.keys()
