"""Several axes at once: what an engine does beside training. `tests/parity/` has the matrix of plans that train."""

import pytest
import torch

from shardwise.ranks.spawn import Ranks
from tests.engine.composed import (
    compiled,
    disagree,
    look_and_load,
    make_batch,
    mean_under_cp,
    token_loss,
    train_net,
    train_under_cp,
)
from tests.same import assert_same
from tests.stages.families import make_family


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("gpt2", "dp=2,pp=2,zero=3,microbatches=2"),
        pytest.param("gpt2", "tp=2,pp=2,microbatches=2", marks=pytest.mark.whole),
        ("mixtral", "dp=2,pp=2,ep=2,zero=1,microbatches=2"),
    ],
)
def test_it_evaluates_and_loads_what_it_saved_and_traces_its_pipeline(model: str, plan: str, four: Ranks) -> None:
    looked = four.run(look_and_load, plan, model)
    with torch.no_grad():
        batch = make_batch(0)
        total, count = token_loss(make_family(model).eval()(input_ids=batch["input_ids"]), batch)
    for found in looked:
        assert found.loss == pytest.approx(float(total / count), rel=1e-5)
        assert found.again == found.loss
        assert found.num_events > 0
        assert " in the state and " in found.refusal


def test_a_mean_over_labels_is_that_of_all_parts_of_sequences(two: Ranks) -> None:
    (pair, *_), (mean, *_) = two.run(train_under_cp, "pair"), two.run(train_under_cp, "mean")
    assert mean == pytest.approx(pair, rel=1e-6)


@pytest.mark.whole
def test_a_sum_over_labels_is_that_of_all_parts_of_sequences(two: Ranks) -> None:
    batch = make_batch(0)
    with torch.no_grad():
        total, _ = token_loss(make_family("llama")(input_ids=batch["input_ids"]), batch)
    assert two.run(train_under_cp, "sum")[0][0] == pytest.approx(float(total) / 64, rel=1e-5)


def test_a_mean_of_something_else_is_refused_where_ranks_have_parts_of_sequences(two: Ranks) -> None:
    for text in two.run(mean_under_cp):
        assert "the loss is one number, and under cp=2 each rank has its own" in text


@pytest.mark.parametrize("plans", [("dp=2", "pp=2"), ("pp=2", "tp=2"), ("dp=2", "dp=4"), ("pp=2", "pp=2,zero=1")])
def test_ranks_that_disagree_on_the_plan_say_so_whatever_engine_each_would_take(
    plans: tuple[str, str], two: Ranks
) -> None:
    first, second = two.run(disagree, plans)
    assert first == second == f"rank 0 has the plan {plans[0]}, but rank 1 has {plans[1]}"


def check_compiled(ranks: Ranks, plan: str) -> None:
    for found, expected in zip(ranks.run(train_net, plan, "aot_eager"), ranks.run(train_net, plan), strict=True):
        assert_same(found, expected)


@pytest.mark.whole
def test_compiled_blocks_train_alike_where_weights_come_and_go(two: Ranks) -> None:
    check_compiled(two, "dp=2,zero=3,microbatches=2")


@pytest.mark.whole
def test_compiled_blocks_train_alike_where_backwards_are_split_beside_replicas(four: Ranks) -> None:
    check_compiled(four, "dp=2,pp=2,schedule=zb-v,microbatches=4,zero=3")


def test_blocks_that_talk_to_other_ranks_are_not_compiled(two: Ranks) -> None:
    for said in two.run(compiled, "tp=2"):
        assert said == "compile with tp=2: ranks talk to each other inside of a block, and a compiled block cannot yet"
