"""A pipeline is the module: every model, every schedule, in one process and in many, the same gradients and weights."""

import pytest

from shardwise.schedule.catalogue import CATALOGUE
from tests.conformance.cases import Case
from tests.conformance.outcomes import Runner, plain
from tests.conformance.table import Errors, Table
from tests.same import worst

TOLERANCE = 1e-5


def test_a_pipeline_trains_as_the_plain_module_does(
    case: Case, runner: Runner, runner_name: str, twice: bool, table: Table
) -> None:
    expected, found = plain(case), runner(case)
    gradient_error, gradient = worst(found.gradients, expected.gradients)
    weights, expected_weights = dict(found.weights), dict(expected.weights)
    if CATALOGUE[case.schedule].num_weight_copies > 1:
        # Two copies see the microbatches in another order, and running statistics depend on it.
        for name in set(weights) - set(found.gradients):
            del weights[name], expected_weights[name]
    weight_error, weight = worst(weights, expected_weights)
    table.note(runner_name, case, Errors(gradient=gradient_error, weight=weight_error))
    assert gradient_error <= TOLERANCE, f"the gradient of {gradient}"
    assert weight_error <= TOLERANCE, f"{weight} after {len(case.lengths)} steps"
    assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    if twice:
        assert runner(case).is_same(found), "a second run is the same bit for bit"
