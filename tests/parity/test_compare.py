"""Two trainings compared: what is off is found on whatever rank, and what is absent is no match."""

import math

import pytest
import torch

from shardwise.parity.compare import compare
from shardwise.parity.course import Course, Step

WEIGHTS = {"a": torch.ones(3), "b": torch.full((2,), 2.0)}


def a_step(**changes: object) -> Step:
    known: dict[str, object] = {"loss": 1.0, "norm": 3.0, "gradients": WEIGHTS, "weights": WEIGHTS, **changes}
    return Step(**known)  # type: ignore[arg-type]


def a_course(*steps: Step) -> Course:
    return Course(steps=steps, first_use=list(WEIGHTS))


def test_a_difference_on_any_rank_is_found_and_told_with_its_rank() -> None:
    expected = a_course(a_step(), a_step())
    off = a_step(gradients={**WEIGHTS, "b": 1.5 * WEIGHTS["b"]})
    comparison = compare(expected, [expected, a_course(a_step(), off), expected])
    first = comparison.first
    assert first is not None
    assert (first.kind, first.name, first.step, first.rank) == ("gradient", "b", 1, 1)
    assert (first.error, first.times) == pytest.approx((0.5, 1.5))
    assert compare(expected, [expected, expected]).is_same


def test_what_a_rank_lacks_or_has_in_another_shape_is_infinitely_far_off() -> None:
    expected = a_course(a_step())
    for gradients in ({"a": WEIGHTS["a"]}, {**WEIGHTS, "b": torch.ones(3)}):
        first = compare(expected, [expected, a_course(a_step(gradients=gradients))]).first
        assert first is not None
        assert (first.kind, first.name, first.rank, first.error) == ("gradient", "b", 1, math.inf)


def test_a_loss_that_is_not_a_number_is_no_match() -> None:
    expected = a_course(a_step())
    first = compare(expected, [a_course(a_step(loss=math.nan))]).first
    assert first is not None
    assert first.kind == "loss"
