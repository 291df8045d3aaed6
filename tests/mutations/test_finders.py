"""What `make test` leaves out guards nothing alone: every seeded fault is found by a test that it runs."""

import re

import pytest

from tests.left_out import LEFT_OUT, ONE_IN, ROOT, finders
from tests.mutations.fault import read_faults


def test_every_fault_has_been_found() -> None:
    assert len(finders()) >= 60
    assert all(finders().values())


def test_no_test_that_found_a_fault_is_left_out(pytestconfig: pytest.Config) -> None:
    left_out = pytestconfig.stash.get(LEFT_OUT, frozenset())
    assert sorted(left_out & set(finders().values())) == []


@pytest.mark.parametrize("test", sorted({name.partition("[")[0] for name in finders().values()}))
def test_a_test_that_found_a_fault_is_still_there(test: str) -> None:
    path, _, name = test.partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


def test_every_row_that_is_run_in_part_is_there() -> None:
    for row in ONE_IN:
        path, _, name = row.partition("::")
        assert f"def {name}" in (ROOT / path).read_text(encoding="utf-8"), row


def test_every_fault_can_still_be_made() -> None:
    """Code that was changed takes its faults along: one that no longer applies guards nothing."""
    for fault in read_faults():
        assert fault.applied_to((ROOT / fault.file).read_text(encoding="utf-8"))
