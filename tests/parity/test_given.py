"""What `check` says of a user's own module, loss and optimizer."""

import pytest

from shardwise.errors import ShardwiseError
from shardwise.parity.check import check
from shardwise.parity.given import problem_from
from shardwise.parity.verdict import Verdict
from shardwise.planner.plan import Plan
from tests.crowd import Crowds

HERE = "tests/parity/given_nets.py"


def checked(name: str, text: str, crowds: Crowds, num_steps: int = 2) -> Verdict:
    plan = Plan.parse(text)
    return check(plan, problem_from(f"{HERE}:{name}", num_steps), ranks=crowds.of(plan.num_ranks), bf16=False)


def test_what_was_covered_and_what_was_not_is_said(crowds: Crowds) -> None:
    verdict = checked("own_training", "dp=2,microbatches=2", crowds, num_steps=8)
    assert verdict.is_same
    assert verdict.coverage.covered == [
        "8 steps: loss, every gradient, their norm, clipped to 0.2, weights where they are used and after the step",
        "whole batches of 8 rows on one device, against 2 replicas and 2 microbatches",
        "SGD in 2 groups, rates by StepLR",
        "gradients in 4 buckets a rank",
        "dropout of 2 modules, with one device's masks",
        "evaluate of another batch, after step 0, 4, 5, 6 and 7",
        "saved after step 4, and loaded by a fresh engine that goes on",
        "saved after step 6, and gone on with under dp=2,zero=3",
    ]
    assert verdict.coverage.left_out[:2] == [
        "frozen and tied weights: the module has none",
        "bf16 with masters: it was not tried",
    ]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mean_of_means", "it is a mean of means over unequal numbers, or looks across rows"),
    ],
)
def test_a_loss_that_depends_on_how_a_batch_is_cut_is_shown_or_refused(name: str, says: str, crowds: Crowds) -> None:
    try:
        verdict = checked(name, "dp=2", crowds)
    except ShardwiseError as error:
        assert "sum" in (error.remedy or "")  # noqa: PT017 - engines may refuse it
        return
    if verdict.is_same:  # Or it is made right: replicas are weighed by their labels.
        assert verdict.by_microbatches is None
        return
    assert verdict.by_microbatches is not None
    assert says in verdict.by_microbatches


def test_a_sum_with_its_number_is_the_same_however_a_batch_is_cut(crowds: Crowds) -> None:
    assert checked("sum_and_number", "dp=2,microbatches=2", crowds).is_same


def test_a_number_that_crosses_stages_unseen_is_shown_or_refused(crowds: Crowds) -> None:
    try:
        verdict = checked("carried", "pp=2,microbatches=2", crowds)
    except ShardwiseError:
        return
    assert not verdict.is_same


def test_numbers_that_ranks_cannot_draw_alike_are_refused(crowds: Crowds) -> None:
    with pytest.raises(ShardwiseError, match="Noisy draws random numbers of its own in forward"):
        checked("noisy", "dp=2", crowds)
