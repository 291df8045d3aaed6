"""A pipeline is the module: every model, every schedule, the same loss, gradients and weights."""

from dataclasses import replace

import pytest

from shardwise.schedule.catalogue import CATALOGUE
from tests.conformance.cases import Case
from tests.conformance.outcomes import Runner, plain, worst
from tests.conformance.table import Table

TOLERANCE = 1e-5


def test_a_pipeline_trains_as_the_plain_module_does(case: Case, runner: Runner, table: Table) -> None:
    expected, found = plain(case), runner(case)
    error, name = worst(found.gradients, expected.gradients)
    table.note(case, error)
    assert error <= TOLERANCE, f"the gradient of {name}"
    assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    weights, expected_weights = dict(found.weights), dict(expected.weights)
    if CATALOGUE[case.schedule].num_weight_copies > 1:
        # Two copies see the microbatches in another order, and running statistics depend on it.
        for name in set(weights) - set(found.gradients):
            del weights[name], expected_weights[name]
    error, name = worst(weights, expected_weights)
    assert error <= TOLERANCE, f"{name} after {len(case.lengths)} steps"
    again = runner(replace(case, lengths=case.lengths[:1]))
    assert again.losses == found.losses[:1]
    assert worst(again.gradients, found.gradients)[0] == 0, "a second run is the same bit for bit"
