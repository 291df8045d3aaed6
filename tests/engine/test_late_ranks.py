"""A rank that stands still in the middle of a step is named, whatever the others wait for: on CPUs, as on GPUs
(`tests/gpu/faults.py`)."""

import pytest

from tests.gpu.faults import try_spawned

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize("plan", ["tp=2", "cp=2", "dp=2,zero=3"])
def test_a_rank_that_stands_still_in_a_forward_is_named(plan: str) -> None:
    row = try_spawned(plan, "late", 1, 1.5, "own")
    assert row.problem is None, row
    assert row.told.keys() == {"0"}
    assert row.sentence.startswith("rank 1 has been at ")
