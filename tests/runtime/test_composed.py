"""Axes alone, in pairs and more at once: the losses, norm, gradients and weights of one device."""

import pytest
import torch

from shardwise.runtime.spawn import Ranks
from tests.runtime.composed import Outcome, alone, look_and_load, make_batch, mean_under_cp, token_loss, train
from tests.runtime.families import make_family

TWO = [
    ("llama", "dp=2"),
    ("llama", "dp=2,zero=1,microbatches=2"),
    ("llama", "dp=2,zero=2,microbatches=2"),
    ("llama", "dp=2,zero=3"),
    ("llama", "tp=2"),
    ("llama", "tp=2,sp=true,recompute=full"),
    ("llama", "cp=2"),
    ("llama", "cp=2,context=all-to-all,zero=2"),
    ("gpt2", "dp=2,zero=3,microbatches=4"),
    ("gpt2", "tp=2"),
    ("mixtral", "dp=2,ep=2"),
    ("mixtral", "dp=2,ep=2,zero=1"),
    ("qwen3-moe", "cp=2,ep=2"),
]
FOUR = [
    ("llama", "dp=2,tp=2"),
    ("llama", "dp=2,tp=2,sp=true,zero=1"),
    ("llama", "dp=2,tp=2,zero=3,microbatches=2"),
    ("llama", "dp=2,pp=2,microbatches=2"),
    ("llama", "dp=2,pp=2,schedule=zb-v,microbatches=4,zero=3"),
    ("llama", "dp=2,pp=2,schedule=interleaved,chunks=2,microbatches=2,zero=2"),
    ("gpt2", "dp=2,pp=2,schedule=zb-h1,microbatches=4,zero=1"),
    ("llama", "tp=2,pp=2,schedule=zb-h1,microbatches=4,sp=true"),
    ("gpt2", "tp=2,pp=2,schedule=1f1b,microbatches=2"),
    ("llama", "cp=2,pp=2,microbatches=2"),
    ("llama", "dp=2,cp=2,zero=2"),
    ("llama", "tp=2,cp=2"),
    ("mixtral", "dp=4,ep=2"),
    ("mixtral", "dp=2,tp=2,ep=2"),
    ("mixtral", "dp=2,pp=2,ep=2,schedule=zb-v,microbatches=2"),
    ("llama", "dp=4,zero=3,zero_group=2"),
]


@pytest.fixture(scope="module")
def plain() -> dict[str, Outcome]:
    return {model: alone(model) for model in {model for model, _ in TWO + FOUR}}


def check(found: Outcome, expected: Outcome) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.norm == pytest.approx(expected.norm, rel=1e-5)
    # A gradient that is zero but for rounding is measured against a thousandth of the largest.
    least = 1e-3 * max(float(each.norm()) for each in expected.gradients.values())
    for name, wanted in expected.gradients.items():
        assert float((found.gradients[name] - wanted).norm()) <= 1e-5 * max(float(wanted.norm()), least), name
    assert found.gradients.keys() == expected.gradients.keys()
    assert found.weights.keys() == expected.weights.keys()
    for name, wanted in expected.weights.items():
        assert float((found.weights[name] - wanted).norm()) <= 1e-5 * float(wanted.norm()), name


def is_same(one: Outcome, other: Outcome) -> bool:
    return one.losses == other.losses and all(
        torch.equal(one.weights[name], other.weights[name]) for name in one.weights
    )


@pytest.mark.parametrize(("model", "plan"), TWO)
def test_two_ranks_train_as_one_device_does(model: str, plan: str, two: Ranks, plain: dict[str, Outcome]) -> None:
    for found in two.run(train, plan, model):
        check(found, plain[model])


@pytest.mark.parametrize(("model", "plan"), FOUR)
def test_four_ranks_train_as_one_device_does(model: str, plan: str, four: Ranks, plain: dict[str, Outcome]) -> None:
    for found in four.run(train, plan, model):
        check(found, plain[model])


@pytest.mark.parametrize("plan", ["dp=2,tp=2,sp=true,zero=1", "dp=2,cp=2,zero=2"])
def test_a_second_run_is_the_same_bit_for_bit(plan: str, four: Ranks) -> None:
    first, again = four.run(train, plan, "llama"), four.run(train, plan, "llama")
    assert all(map(is_same, first, again))


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("gpt2", "dp=2,pp=2,zero=3,microbatches=2"),
        ("gpt2", "tp=2,pp=2,microbatches=2"),
        ("mixtral", "dp=2,pp=2,ep=2,zero=1,microbatches=2"),
    ],
)
def test_it_evaluates_and_loads_what_it_saved_and_traces_its_pipeline(model: str, plan: str) -> None:
    with Ranks(4) as ranks, torch.no_grad():
        looked = ranks.run(look_and_load, plan, model)
        batch = make_batch(0)
        total, count = token_loss(make_family(model).eval()(input_ids=batch["input_ids"]), batch)
    for found in looked:
        assert found.loss == pytest.approx(float(total / count), rel=1e-5)
        assert found.again == found.loss
        assert found.num_events > 0
        assert " in the state and " in found.refusal


def test_a_mean_loss_is_refused_where_ranks_have_parts_of_sequences(two: Ranks) -> None:
    for text in two.run(mean_under_cp):
        assert "the loss is a mean, and under cp=2 a mean of means" in text
