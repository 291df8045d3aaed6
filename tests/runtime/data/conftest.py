"""Ranks that stay up for all tests of data parallelism, and what one device makes of each case."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shardwise.runtime.spawn import Ranks
from tests.runtime.data.programs import Case, Outcome, alone
from tests.runtime.small import small_matrices


class Crowd(Ranks):
    """Ranks that have two minutes for anything: what hangs is a failure."""

    def run(self, fn: Callable[..., Any], *args: Any, timeout_seconds: float | None = 120) -> list[Any]:
        return super().run(fn, *args, timeout_seconds=timeout_seconds)


GetRanks = Callable[[int], Crowd]


@pytest.fixture(scope="session")
def ranks() -> Iterator[GetRanks]:
    """Ranks by their number. Only one crowd is up at a time."""
    up: dict[int, Crowd] = {}

    def get(count: int) -> Crowd:
        for other in [each for each in up if each != count]:
            up.pop(other).close()
        return up.setdefault(count, Crowd(count))

    yield get
    for each in up.values():
        each.close()


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
