"""What optimizers remember, saved under one plan and loaded under another: training goes on as on one device."""

from functools import cache

import pytest
import torch

from shardwise.ranks.spawn import Ranks
from tests.engine import going_on
from tests.engine.going_on import AFTER, BEFORE, Outcome
from tests.stages.small import small_matrices

CASES = [
    ("two layers", "adamw", "dp=4,zero=3", "tp=2,pp=2,microbatches=2"),
    pytest.param(
        "two layers", "adamw", "tp=2,pp=2,sp=true,microbatches=2", "dp=2,cp=2,zero=1", marks=pytest.mark.whole
    ),
    # Both of these plans are in the cases beside it.
    pytest.param("dense", "adamw", "dp=2,cp=2,zero=2", "pp=4,microbatches=4", marks=pytest.mark.whole),
    pytest.param("dense", "adamw", "pp=4,microbatches=4", "dp=4,zero=3,zero_group=2", marks=pytest.mark.whole),
    pytest.param("two layers", "sgd", "dp=2,tp=2", "dp=2,pp=2,microbatches=2,zero=1", marks=pytest.mark.whole),
    pytest.param("two layers", "adafactor", "dp=2,tp=2,zero=1", "dp=4", marks=pytest.mark.whole),
    pytest.param(
        "dense",
        "adamw",
        "dp=4,zero=2,offload.optimizer=1",
        "pp=4,microbatches=4,offload.optimizer=0.5",
        marks=pytest.mark.whole,
    ),
    pytest.param("two layers", "muon", "dp=2,tp=2,zero=2", "dp=2,pp=2,microbatches=2", marks=pytest.mark.whole),
    ("experts", "adamw", "dp=4,ep=2,zero=1", "dp=2,tp=2,ep=2"),
]


@cache
def plain(model: str, optimizer: str) -> Outcome:
    with small_matrices():
        return going_on.alone(model, optimizer)


@pytest.mark.parametrize(("model", "optimizer", "first", "second"), CASES)
def test_training_goes_on_under_another_plan(model: str, optimizer: str, first: str, second: str, four: Ranks) -> None:
    expected = plain(model, optimizer)
    for found in four.run(going_on.go_on, first, second, model, optimizer):
        assert found.state["state"].keys() == expected.state.keys()
        for name, wanted in expected.state.items():
            assert found.state["state"][name].keys() == wanted.keys()
            for key, each in wanted.items():
                torch.testing.assert_close(found.state["state"][name][key], each, rtol=1e-4, atol=1e-6)
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)
        for name, each in expected.weights.items():
            assert float((found.weights[name] - each).norm()) <= 2e-5 * float(each.norm()), name


@pytest.mark.parametrize(
    ("states", "first", "second"),
    [
        ("bf16", "dp=2,zero=3,offload.optimizer=1", "tp=2"),
        ("8bit", "dp=2,zero=2", "tp=2"),
        pytest.param("8bit", "tp=2", "dp=2,zero=3", marks=pytest.mark.whole),
    ],
)
def test_compact_states_go_on_as_those_of_torch_under_another_plan(
    states: str, first: str, second: str, two: Ranks
) -> None:
    expected = plain("two layers", "adamw")
    for found in two.run(going_on.go_on, first, second, "two layers", f"adamw {states}"):
        assert found.state["state"].keys() == expected.state.keys()
        for name, wanted in expected.state.items():
            mine = found.state["state"][name]
            assert mine.keys() == wanted.keys()
            for key, each in wanted.items():
                assert (mine[key].dtype, mine[key].shape) == (each.dtype, each.shape)
                # Half a step of bf16 is 0.4 %; of 8 bits up to 15 % in the lowest decades, and a percent near the top.
                assert float((mine[key] - each).norm()) <= (0.01 if states == "bf16" else 0.05) * float(each.norm())
        assert found.losses == pytest.approx(expected.losses, rel=2e-3)


def test_one_process_goes_on_with_what_ranks_saved(four: Ranks) -> None:
    found = four.run(going_on.go_on, "dp=2,tp=2,zero=1", "dp=2,tp=2,zero=1", "two layers", "adamw")[0]
    with small_matrices(), going_on.make_engine("pp=2,microbatches=2", "two layers", "adamw") as engine:
        going_on.train(engine, 0, BEFORE)
        mine = engine.optimizer_state_dict()
        engine.load_optimizer_state_dict(found.state)
        losses = going_on.train(engine, BEFORE, AFTER)
    assert mine["param_groups"] == found.state["param_groups"]
    assert losses == pytest.approx(found.losses, rel=1e-5)


def test_settings_that_were_changed_while_training_are_kept(four: Ranks) -> None:
    for found in four.run(going_on.settings_go_on, "dp=4,zero=3", "tp=2,pp=2,microbatches=2"):
        assert found == [0.125]


#: What is said of each of `going_on._misfits`.
REFUSALS = [
    "the optimizers' state has no 'param_groups'; it has state",
    "unknown parameter of an optimizers' state 'layers.0.mlp.upp_proj.weight'; known: ",
    "exp_avg of layers.0.mlp.up_proj.weight has shape (3, 5) in the optimizers' state, and the parameter",
    "the optimizers' state is not of AdamW: of ",
    "no group of the optimizers' state has ",
]


@pytest.mark.parametrize("number", range(len(REFUSALS)))
def test_a_state_that_does_not_fit_is_refused(number: int, two: Ranks) -> None:
    start = REFUSALS[number]
    # Engines of a mesh and of a pipeline in turn. Of a misshapen entry only those ranks speak that need it.
    said = two.run(going_on.refusal, ("dp=2,zero=1", "pp=2,microbatches=4")[number % 2], number)
    assert any(text.startswith(start) for text in said), said
    assert all(text.startswith(start) or text == "nothing" for text in said), said
