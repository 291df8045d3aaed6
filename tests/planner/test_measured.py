"""Our own runtime as a source: what thirteen plans hold on each rank, measured, against the account of `fit`."""

import pytest

from shardwise.cost.software import Software
from shardwise.planner.account import account, hold
from shardwise.planner.plan import Plan
from shardwise.planner.question import make_question
from shardwise.ranks.spawn import Ranks
from tests.planner.measured import LENGTH, ROWS, make_module, make_sixteen, measure, measure_sixteen

TWO = [
    ("llama", "dp=2"),
    pytest.param("llama", "dp=2,zero=1,microbatches=2", marks=pytest.mark.whole),
    ("llama", "dp=2,zero=2,microbatches=2"),
    ("llama", "dp=2,zero=3"),
    pytest.param("llama", "tp=2", marks=pytest.mark.whole),
    ("llama", "tp=2,sp=true"),
    ("llama", "pp=2,microbatches=4,layers=4+2"),
    ("llama", "pp=2,microbatches=4,schedule=interleaved,layers=2+2+1+1"),
    ("mixtral", "dp=2,ep=2"),
    ("mixtral", "tp=2"),
    pytest.param("mixtral", "dp=2,ep=2,zero=1", marks=pytest.mark.whole),
]
FOUR = [
    pytest.param("llama", "dp=2,tp=2,zero=1", marks=pytest.mark.whole),
    ("llama", "dp=2,pp=2,zero=1,microbatches=4,layers=2+4"),
    pytest.param("llama", "tp=2,pp=2,microbatches=4,layers=3+3", marks=pytest.mark.whole),
]
#: Modules of Hugging Face as they are: elementwise operations and norms one by one.
PLAIN = Software(fused=False, fused_norms=False, gathered_once=True, cuts_experts=True)
CLOSE = 0.05


def check(ranks: Ranks, model: str, text: str) -> None:
    plan = Plan.parse(text)
    question = make_question(
        make_module(model), cluster=f"{plan.num_ranks}xcpu", batch=ROWS, sequence=LENGTH, software=PLAIN
    )
    predicted = account(question, plan)
    for found in ranks.run(measure, text, model):
        parts = predicted.ranks[found.place].parts
        assert parts["weights"] == pytest.approx(found.weights, rel=CLOSE)
        assert parts["gradients"] == pytest.approx(found.gradients, rel=CLOSE)
        assert parts["optimizer"] + parts["masters"] == pytest.approx(found.optimizer, rel=CLOSE)
        assert parts["activations"] == pytest.approx(found.activations, rel=CLOSE)


@pytest.mark.parametrize(("model", "plan"), TWO)
def test_two_ranks_hold_what_fit_says(model: str, plan: str, two: Ranks) -> None:
    check(two, model, plan)


@pytest.mark.parametrize(("model", "plan"), FOUR)
def test_four_ranks_hold_what_fit_says(model: str, plan: str, four: Ranks) -> None:
    check(four, model, plan)


@pytest.mark.parametrize("text", ["dp=2", "dp=2,zero=1", "dp=2,zero=2,microbatches=2", "dp=2,zero=3"])
def test_two_ranks_hold_16_bit_weights_as_fit_says(text: str, two: Ranks) -> None:
    plan = Plan.parse(f"{text},precision=bf16")
    parts = account(make_question(make_sixteen(), cluster="2xcpu", batch=ROWS, sequence=LENGTH), plan).ranks[0].parts
    for found in two.run(measure_sixteen, str(plan)):
        assert parts["weights"] == pytest.approx(found.weights, rel=CLOSE)
        assert parts["gradients"] == pytest.approx(found.gradients, rel=CLOSE)  # Activations are more than the copies.
        assert parts["optimizer"] + parts["masters"] == pytest.approx(found.optimizer, rel=CLOSE)
        # The optimizer has all of a rank's gradients in fp32 at once, like its master weights.
        assert found.in_step == pytest.approx(parts["masters"], rel=CLOSE)


@pytest.mark.parametrize(
    "text",
    [
        "dp=2,zero=1,offload.optimizer=1", "dp=2,offload.parameters=1", "dp=2,zero=1,offload.parameters=1",
        "dp=2,zero=2,offload.parameters=1", "dp=2,zero=3,offload.parameters=1",
    ],
)  # fmt: skip
def test_two_hosts_hold_16_bit_weights_as_fit_says(text: str, two: Ranks) -> None:
    plan = Plan.parse(f"{text},precision=bf16")
    question = make_question(make_sixteen(), cluster="2xcpu", batch=ROWS, sequence=LENGTH)
    for found in two.run(measure_sixteen, str(plan)):
        assert hold(question, plan)[0].on_host == pytest.approx(found.host, rel=CLOSE)
