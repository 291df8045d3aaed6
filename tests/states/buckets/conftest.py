"""What one device makes of each case."""

from collections.abc import Callable

import pytest

from tests.stages.small import small_matrices
from tests.states.buckets.programs import Case, Outcome, alone


@pytest.fixture(scope="session")
def on_one_device() -> Callable[[Case], Outcome]:
    """The same training by plain torch, once for all plans that it is held against."""
    known: dict[str, Outcome] = {}

    def outcome(case: Case) -> Outcome:
        key = repr((case.optimizer, case.net, case.clip, case.num_steps, case.rows))
        if key not in known:
            with small_matrices():
                known[key] = alone(case)
        return known[key]

    return outcome
