"""A check finds what is broken on purpose, names the tensor and its owners, and refuses what it cannot break."""

import pytest

from shardwise.errors import ShardwiseError
from shardwise.parity.check import check
from shardwise.parity.compare import Kind
from shardwise.parity.faults import FAULTS
from shardwise.parity.models import default_settings, problem_of
from shardwise.parity.verdict import Verdict
from shardwise.planner.plan import Plan
from tests.crowd import Crowds

#: The fault, the plan, and what differs first: its kind, a part of its name, and the step.
CAUGHT: list[tuple[str, str, Kind, str, int]] = [
    ("unscaled-gradients", "dp=2", "gradient", "norm.weight", 0),
    ("unscaled-gradients", "tp=2,sp=true", "gradient", "norm.weight", 0),
    ("unscaled-gradients", "pp=2,microbatches=2", "gradient", "norm.weight", 0),
    ("missing-reduction", "dp=2", "gradient", "layers.", 0),
    ("missing-reduction", "dp=2,zero=1", "gradient", "layers.", 0),
    ("missing-reduction", "cp=2,zero=3", "gradient", "layers.", 0),
    ("missing-reduction", "tp=2", "gradient", "layers.0.attention_norm.weight", 0),
    ("missing-reduction", "tp=2,sp=true", "gradient", "norm.weight", 0),
    ("missing-reduction", "pp=2,microbatches=2", "gradient", "embed.weight", 0),
    ("swapped-shard", "tp=2", "used weight", "layers.0.attention.q_proj.weight", 0),
    ("swapped-shard", "dp=2,ep=2", "used weight", "layers.0.mlp.experts.gate_proj", 0),
    ("swapped-shard", "dp=2,zero=1", "used weight", "", 0),
    ("unmasked-padding", "tp=2", "loss", "norm.weight", 0),
    ("unmasked-padding", "cp=2", "loss", "norm.weight", 0),
    ("stale-gather", "dp=2,zero=1", "weight", "", 0),
    ("stale-gather", "dp=2,zero=3", "weight", "layers.", 0),
]


def checked(text: str, crowds: Crowds, fault: str | None = None, num_steps: int = 2) -> Verdict:
    plan = Plan.parse(text)
    settings = default_settings(plan)
    make = problem_of(settings, plan, num_steps)
    return check(plan, make, fault=fault, vocabulary=settings.vocabulary, ranks=crowds.of(plan.num_ranks))


@pytest.mark.parametrize(("fault", "text", "kind", "name", "step"), CAUGHT, ids=[f"{f}-{p}" for f, p, *_ in CAUGHT])
def test_a_fault_is_caught_and_its_tensor_named(
    fault: str, text: str, kind: Kind, name: str, step: int, crowds: Crowds
) -> None:
    verdict = checked(text, crowds, fault, num_steps=2 if fault == "stale-gather" else 1)
    first = verdict.comparison.first
    assert first is not None
    assert (first.kind, first.step) == (kind, step)
    assert first.name is not None
    assert name in first.name
    assert verdict.owners


def test_every_fault_is_caught_somewhere() -> None:
    assert {fault for fault, *_ in CAUGHT} == set(FAULTS)


def test_gradients_that_are_not_divided_are_too_large_by_the_number_of_labels(crowds: Crowds) -> None:
    plan = Plan.parse("dp=2")
    batch = problem_of(default_settings(plan), plan, 1)().batches[0]
    first = checked("dp=2", crowds, "unscaled-gradients", num_steps=1).comparison.first
    assert first is not None
    assert first.times == pytest.approx(int((batch["labels"] != -100).sum()), rel=1e-4)


def test_owners_are_told_with_their_stage_and_their_part(crowds: Crowds) -> None:
    assert checked("tp=2", crowds, "swapped-shard", num_steps=1).owners == (
        "rank 0: stage 0, 16 of 32 along dim 0",
        "rank 1: stage 0, 16 of 32 along dim 0",
    )
    assert checked("pp=2,microbatches=2", crowds, "missing-reduction", num_steps=1).owners == (
        "rank 0: stage 0, whole",
        "rank 1: stage 1, whole",
    )


@pytest.mark.parametrize("text", ["dp=2,zero=3", "tp=2,sp=true", "dp=1"])
def test_nothing_differs_where_nothing_is_broken(text: str, crowds: Crowds) -> None:
    verdict = checked(text, crowds)
    assert verdict.comparison.is_same
    assert verdict.owners == ()
    assert verdict.comparison.worst("used weight", "loss", "gradient", "norm", "weight") < 1e-5


@pytest.mark.parametrize(
    ("fault", "text", "problem", "remedy"),
    [
        (
            "missing-reduction",
            "dp=1",
            "missing-reduction cannot be injected under dp=1: nothing is summed over ranks: there are no replicas, no"
            " tensor parallel ranks and no tied stages",
            "--plan dp=2",
        ),
        (
            "swapped-shard",
            "dp=2",
            "swapped-shard cannot be injected under dp=2: every tensor is whole where it is held",
            "--plan tp=2, or --plan dp=2,zero=1",
        ),
        (
            "unmasked-padding",
            "dp=2",
            "unmasked-padding cannot be injected under dp=2: nothing is padded without tp (a vocabulary) or cp (a"
            " sequence)",
            "--plan tp=2",
        ),
        (
            "stale-gather",
            "tp=2",
            "stale-gather cannot be injected under tp=2: weights are whole on all replicas under zero=0, so none is"
            " gathered",
            "--plan dp=2,zero=3",
        ),
        (
            "stale-weights",
            "tp=2",
            "unknown fault 'stale-weights'; known: unscaled-gradients, missing-reduction, swapped-shard,"
            " unmasked-padding, stale-gather",
            "--inject stale-gather",
        ),
    ],
)
def test_a_fault_that_a_plan_has_no_place_for_is_refused(
    fault: str, text: str, problem: str, remedy: str, crowds: Crowds
) -> None:
    with pytest.raises(ShardwiseError) as caught:
        checked(text, crowds, fault)
    assert (caught.value.problem, caught.value.remedy) == (problem, remedy)


def test_a_stale_weight_wants_two_steps(crowds: Crowds) -> None:
    with pytest.raises(ShardwiseError, match="shows from the second step on, and there is 1"):
        checked("dp=2,zero=3", crowds, "stale-gather", num_steps=1)


def test_a_plan_of_more_ranks_than_a_laptop_runs_is_offered_in_small(crowds: Crowds) -> None:
    plan = Plan.parse("dp=16,tp=8,pp=4,microbatches=8")
    with pytest.raises(ShardwiseError, match="the plan has 512 ranks, and each is a process here: at most 32") as error:
        check(plan, problem_of(default_settings(plan), plan, 1), ranks=crowds.of(2))
    assert error.value.remedy == "--plan dp=2,tp=2,pp=2, the same axes in small"
