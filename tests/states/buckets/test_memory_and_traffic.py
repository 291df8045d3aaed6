"""What a rank holds and what it sends, against the formulas."""

from dataclasses import astuple

import pytest
import torch

from tests.crowd import Crowds
from tests.states.buckets.programs import Case, Outcome, train

#: All sizes are multiples of 16 and of 4 ranks, so nothing is padded.
EVEN = {"width": 48, "wider": 16, "vocabulary": 64, "num_blocks": 2}


def run(crowds: Crowds, count: int, zero: int, **settings: object) -> list[Outcome]:
    case = Case(plan=f"dp={count},zero={zero}", num_steps=2, **settings)  # type: ignore[arg-type]
    return crowds.of(count).run(train, case)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bytes_a_parameter_in_low_precision_are_those_of_the_zero_paper(crowds: Crowds, zero: int, count: int) -> None:
    expected = {0: 16.0, 1: 4 + 12 / count, 2: 2 + 14 / count, 3: 16 / count}[zero]
    for found in run(crowds, count, zero, net=EVEN, precision=torch.bfloat16):
        assert sum(astuple(found.held)) / found.num_parameters == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bytes_a_parameter_in_full_precision(crowds: Crowds, zero: int) -> None:
    expected = {0: 16.0, 1: 8 + 8 / 2, 2: 4 + 12 / 2, 3: 16 / 2}[zero]
    for found in run(crowds, 2, zero, net=EVEN):
        assert sum(astuple(found.held)) / found.num_parameters == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_a_rank_sends_in_a_step_is_exactly_the_formula(crowds: Crowds, zero: int, count: int) -> None:
    found = run(crowds, count, zero, net=EVEN)[0]
    once = 4 * found.num_parameters * (count - 1) // count
    expected = {
        0: {"all_reduce": 2 * once},
        1: {"reduce_scatter": once, "all_gather": once},
        2: {"reduce_scatter": once, "all_gather": once},
        3: {"reduce_scatter": once, "all_gather": 2 * once},
    }[zero]
    assert {kind: sent for kind, sent in found.sent.items() if sent} == expected


def test_each_more_microbatch_is_one_more_sum_where_gradients_are_never_whole(crowds: Crowds) -> None:
    case = Case(plan="dp=2,zero=2,microbatches=4", num_steps=1, net=EVEN)
    found = crowds.of(2).run(train, case)[0]
    assert found.sent["reduce_scatter"] == 4 * 4 * found.num_parameters // 2


def test_hybrid_sharding_sends_between_copies_only_a_shard(crowds: Crowds) -> None:
    case = Case(plan="dp=4,zero=1", num_steps=1, net=EVEN, shard_size=2)
    found = crowds.of(4).run(train, case)[0]
    assert found.sent["all_reduce"] == 2 * 4 * found.num_parameters // 2 // 2
    assert found.sent["reduce_scatter"] == 4 * found.num_parameters // 2
