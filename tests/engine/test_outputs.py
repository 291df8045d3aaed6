"""`predict`, and metrics beside the loss, under every kind of plan."""

import re

import pytest
import torch

from tests.crowd import Crowds
from tests.engine.outputs import apart, many, refused_metrics, sums

#: Every axis and every place that states live in meets one; the others are tried whole.
TWO = ("dp=2,zero=3", "tp=2,sp=true", "pp=2,microbatches=2", "cp=2", "dp=2,ep=2")
MORE_OF_TWO = (
    "dp=2", "dp=2,zero=1", "dp=2,zero=2", "tp=2", "cp=2,context=all-to-all", "dp=2,offload.parameters=1.0",
    "dp=2,offload.optimizer=1.0", "pp=2,microbatches=4,schedule=zb-v", "pp=2,microbatches=4,schedule=dualpipe",
    "pp=2,microbatches=4,schedule=pipedream-2bw", "pp=2,microbatches=2,recompute=full", "dp=2,precision=bf16",
)  # fmt: skip
FOUR = ("dp=2,tp=2,zero=1",)
MORE_OF_FOUR = ("tp=2,pp=2,microbatches=2", "cp=2,tp=2,sp=true", "dp=2,pp=2,microbatches=2,zero=1", "dp=2,cp=2,ep=2")
CASES = [
    *((2, plan) for plan in TWO), *((4, plan) for plan in FOUR),
    *(pytest.param(2, plan, marks=pytest.mark.whole) for plan in MORE_OF_TWO),
    *(pytest.param(4, plan, marks=pytest.mark.whole) for plan in MORE_OF_FOUR),
]  # fmt: skip


@pytest.mark.parametrize(("count", "plan"), CASES, ids=str)
def test_every_rank_predicts_what_the_plain_module_returns_and_measures_its_accuracy(
    count: int, plan: str, crowds: Crowds
) -> None:
    near = 0.1 if "bf16" in plan else 1e-5
    for found in crowds.of(count).run(apart, plan):
        assert all(far < near for _, far in found), found


@pytest.mark.parametrize("plan", ["dp=2", "pp=2,microbatches=2"])
def test_a_batch_of_any_number_of_rows_is_predicted(plan: str, crowds: Crowds) -> None:
    for rows in (1, 5):
        for found in crowds.of(2).run(apart, plan, rows):
            assert all(far < 1e-5 for _, far in found), found


@pytest.mark.parametrize("plan", ["pp=2,microbatches=2", "dp=2", "tp=2"])  # First where a rank has no output.
def test_outputs_are_joined_whatever_they_are_made_of(plan: str, crowds: Crowds) -> None:
    assert crowds.of(2).run(many, plan) == [None, None]


def test_what_cannot_be_joined_is_refused(crowds: Crowds) -> None:
    for odd, words in (
        ("set", "the module returns a set, and what is inside it cannot be joined"),
        ("number", "the module returns .* for one microbatch and .* for another"),
        ("shape", "has no row for each of the 2 of a microbatch and is not the same for all"),
    ):
        for said in crowds.of(2).run(many, "dp=2", odd):
            assert re.search(words, said), said
    (said, _) = crowds.of(2).run(many, "dp=2", "", 3)
    assert "the batch of 3 rows does not divide into 2 equal ones" in said


def test_one_process_runs_a_pipeline_and_gives_the_outputs_of_all() -> None:
    assert many("pp=2,microbatches=2") is None
    assert many("pp=1") is None


@pytest.mark.parametrize("plan", ["pp=2,microbatches=2", "dp=2", "tp=2"])  # First where a rank has no output.
def test_metrics_of_the_loss_are_those_of_the_whole_batch(plan: str, crowds: Crowds) -> None:
    rows = 8 if plan == "tp=2" else 4
    # Of -3 to 4 the mean is 1/2, and of those above 0 it is 5/2, though parts have different numbers of them.
    assert crowds.of(2).run(sums, plan) == [{"mean": 0.5, "kept": 2.5, "one": 1.0, "rows": rows}] * 2


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (0.5, "metrics are a float, and not numbers by name"),
        ({"hits": torch.zeros(3)}, r"the metric hits is a Tensor of shape \(3,\), and not one number"),
        ({"hits": (1, 2, 3)}, "the metric hits is a tuple of 3, and not one number"),
    ],
    ids=["no dictionary", "a tensor", "three"],
)
def test_metrics_that_are_no_numbers_are_refused(made: object, words: str) -> None:
    assert re.search(words, refused_metrics("pp=1", made))
