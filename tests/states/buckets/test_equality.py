"""Training on replicas, under every ZeRO stage, is training on one device."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.crowd import Crowds
from tests.states.buckets.programs import EXCHANGES, Case, Outcome, train

ZEROS = (0, 1, 2, 3)
SCHEDULES = ("1f1b", "zb-v", "dualpipe")
OPTIMIZERS = ("adamw", "sgd", "adafactor", "muon")
ODD = {"tied": True, "extras": True}


def assert_same(outcomes: list[Outcome], expected: Outcome, tolerance: float = 1e-5) -> None:
    """Losses, norms, every gradient and every weight, relative to the largest number of each."""
    seen: set[str] = set()
    for found in outcomes:
        assert found.losses == pytest.approx(expected.losses, rel=tolerance)
        assert found.norms == pytest.approx(expected.norms, rel=tolerance)
        assert found.evaluated == pytest.approx(expected.evaluated, rel=tolerance)
        for name, weight in found.weights.items():
            seen.add(name)
            assert _difference(weight, expected.weights[name]) < tolerance, f"weight {name}"
        for name, gradient in found.gradients.items():
            wanted = expected.gradients.get(name)
            assert (gradient is None) == (wanted is None), f"gradient {name}"
            if gradient is not None and wanted is not None:
                assert _difference(gradient, wanted) < tolerance, f"gradient {name}"
    assert seen >= set(expected.gradients)


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def square(others: tuple[str, ...], is_run: Callable[[int, int], bool]) -> list[Any]:
    """Each of `ZEROS` with each of these. Only some are run without `--whole`."""
    return [
        pytest.param(zero, other, id=f"{zero}-{other}", marks=() if is_run(zero, at) else pytest.mark.whole)
        for zero in ZEROS
        for at, other in enumerate(others)
    ]


# AdamW with each, and each of the others with two: of those that update whole matrices, with 1 and 2 or with 2 and 3.
@pytest.mark.parametrize(
    ("zero", "optimizer"), square(OPTIMIZERS, lambda zero, at: at == 0 or zero in ((), (0, 3), (1, 2), (2, 3))[at])
)
def test_two_replicas_train_as_one_device(
    crowds: Crowds, on_one_device: Callable[[Case], Outcome], zero: int, optimizer: str
) -> None:
    case = Case(plan=f"dp=2,zero={zero},microbatches=2", optimizer=optimizer, net=ODD, clip=0.3)
    assert_same(crowds.of(2).run(train, case), on_one_device(case))


@pytest.mark.parametrize(("zero", "exchange"), square(tuple(EXCHANGES), lambda zero, at: (zero + at) % 2 == 0))
def test_what_sums_on_gpus_does_the_same(
    crowds: Crowds, on_one_device: Callable[[Case], Outcome], zero: int, exchange: str
) -> None:
    case = Case(plan=f"dp=2,zero={zero},microbatches=2", net=ODD, clip=0.3, exchange=exchange)
    assert_same(crowds.of(2).run(train, case), on_one_device(case))


@pytest.mark.parametrize("zero", ZEROS)
def test_three_replicas_share_out_what_does_not_divide_by_three(
    crowds: Crowds, on_one_device: Callable[[Case], Outcome], zero: int
) -> None:
    case = Case(plan=f"dp=3,zero={zero},microbatches=2", net={"extras": True}, rows=12, clip=0.3)
    assert_same(crowds.of(3).run(train, case), on_one_device(case))


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_matrices_with_pieces_on_three_ranks_are_updated_whole(
    crowds: Crowds, on_one_device: Callable[[Case], Outcome], optimizer: str
) -> None:
    case = Case(plan="dp=3,zero=2,microbatches=2", rows=12, optimizer=optimizer, bucket_bytes=10**6)
    assert_same(crowds.of(3).run(train, case), on_one_device(case))


@pytest.mark.parametrize(
    ("zero", "schedule"), square(SCHEDULES, lambda zero, at: at in ((0, 2), (0, 1), (1,), (0, 2))[zero])
)
def test_replicas_of_a_pipeline_train_as_one_device(
    crowds: Crowds, on_one_device: Callable[[Case], Outcome], zero: int, schedule: str
) -> None:
    # Each of `ZEROS`, and each schedule, has a weight at both ends of the pipe and none.
    tied = (zero + SCHEDULES.index(schedule)) % 2 == 0
    case = Case(
        plan=f"dp=2,pp=2,zero={zero},microbatches=4,schedule={schedule}", net={"tied": tied, "extras": True}, clip=0.3
    )
    assert_same(crowds.of(4).run(train, case), on_one_device(case))


def test_a_pipeline_gathers_whole_stages_where_it_must_own_the_gathers(
    crowds: Crowds, on_one_device: Callable[[Case], Outcome]
) -> None:
    case = Case(plan="dp=2,pp=2,zero=3,microbatches=4,schedule=interleaved", net=ODD, layerwise=False)
    assert_same(crowds.of(4).run(train, case), on_one_device(case))


@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=pytest.mark.whole), 3])
def test_hybrid_sharding_repeats_the_shards_of_two_ranks_on_two_others(
    crowds: Crowds, on_one_device: Callable[[Case], Outcome], zero: int
) -> None:
    case = Case(plan=f"dp=4,zero={zero},microbatches=2", net=ODD, clip=0.3, shard_size=2)
    outcomes = crowds.of(4).run(train, case)
    assert_same(outcomes, on_one_device(case))
    assert outcomes[0].held == crowds.of(4).run(train, replace(case, num_steps=1))[2].held


@pytest.mark.parametrize("zero", [*(pytest.param(each, marks=pytest.mark.whole) for each in (0, 1, 2)), 3])
def test_a_rerun_gives_the_same_bits_on_every_rank(crowds: Crowds, zero: int) -> None:
    case = Case(plan=f"dp=4,zero={zero},microbatches=2", net=ODD, clip=0.3)
    first, second = crowds.of(4).run(train, case), crowds.of(4).run(train, case)
    for name, weight in first[0].weights.items():
        for other in (*first[1:], *second):
            assert torch.equal(weight, other.weights[name]), name
    assert {tuple(each.losses) for each in (*first, *second)} == {tuple(first[0].losses)}


@pytest.mark.parametrize("zero", ZEROS)
def test_low_precision_with_full_precision_copies_follows_full_precision(
    crowds: Crowds, on_one_device: Callable[[Case], Outcome], zero: int
) -> None:
    case = Case(plan=f"dp=2,zero={zero}", precision=torch.bfloat16, optimizer="sgd")
    outcomes = crowds.of(2).run(train, case)
    assert outcomes[0].weights["head.weight"].dtype is torch.bfloat16
    # bf16 has 8 bits: weights are 0.4 % apart after rounding, and gradients about as much more.
    assert_same(outcomes, on_one_device(case), tolerance=0.08)
