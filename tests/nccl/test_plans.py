"""What ranks ask of NCCL under the plans of the matrix: the same on all, it can end, and no memory is used early."""

from functools import partial

import pytest

from shardwise.nccl.check import prove
from shardwise.nccl.program import Program
from shardwise.parity.problem import Problem
from shardwise.parity.programs import record_on_rank
from shardwise.planner.plan import Plan
from tests.crowd import Crowds
from tests.nccl.mistakes import PLANS
from tests.nccl.short import make_short
from tests.parity.cases import CASES

EVERY = [(count, model, plan) for count, cases in CASES.items() for model, plan in cases]
#: What has every part of the others, beside the plans that mistakes are made in; those are run by `--whole`.
RUN = {
    "pp=2,schedule=pipedream-2bw,microbatches=2,offload.optimizer=1",
    "dp=2,ep=2,zero=1,offload.optimizer=1,offload.activations=1",
    "tp=2,pp=2,schedule=zb-h1,microbatches=4,sp=true",
    "dp=2,pp=2,ep=2,schedule=zb-v,microbatches=2",
    "dp=2,cp=2,context=all-to-all,zero=3",
}


@pytest.mark.parametrize(
    ("count", "model", "text"),
    [
        pytest.param(*each, id=f"{each[1]}-{each[2]}", marks=() if each[2] in RUN else pytest.mark.whole)
        for each in EVERY
    ],
)
def test_what_the_ranks_of_a_plan_ask_of_nccl_is_right(count: int, model: str, text: str, crowds: Crowds) -> None:
    plan = Plan.parse(text)
    programs: list[Program] = crowds.of(count).run(record_on_rank, plan, make_short(model, plan), 120.0)
    proof = prove(programs)
    assert not proof.problems, "\n".join(map(str, proof.problems[:8]))
    assert proof.ranks == count
    assert all(any(each.operation and not each.operation.on_host for each in one.issued) for one in programs)


def test_what_is_run_has_every_axis_and_every_kind_of_schedule_and_offload() -> None:
    texts = [*RUN, *(text for _, text in PLANS.values())]
    assert {text for _, _, text in EVERY} >= RUN
    plans = [Plan.parse(text) for text in texts]
    for axis in ("dp", "tp", "pp", "cp", "ep"):
        assert any(getattr(plan, axis) > 1 for plan in plans), axis
    assert {plan.zero for plan in plans} == {0, 1, 2, 3}
    assert {plan.context for plan in plans} == {"ring", "all-to-all"}
    assert {"1f1b", "zb-h1", "zb-v", "pipedream-2bw", "dualpipe"} <= {plan.schedule for plan in plans}
    for kind in ("optimizer", "activations", "parameters"):
        assert any(getattr(plan.offload, kind) for plan in plans), kind


def test_layers_that_send_in_chunks_as_gpus_do_are_right_too(two) -> None:  # type: ignore[no-untyped-def]
    """On a GPU large layers send what they compute in chunks; a CPU does so if it is told."""
    plan = Plan.parse("tp=2,sp=true")
    programs: list[Program] = two.run(record_on_rank, plan, partial(_chunked, plan), 120.0)
    assert not prove(programs).problems
    assert prove(programs).most_under_way > 1


def _chunked(plan: Plan) -> Problem:
    problem = make_short("tied", plan)()
    return Problem(
        module=problem.module, batches=problem.batches, loss=problem.loss, options={"tensor_chunks": 2, "verify": False}
    )
