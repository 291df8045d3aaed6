"""What `make test` leaves out guards nothing alone: every seeded fault is found by a test that it runs."""

import re
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from tests.left_out import LEFT_OUT, ONE_IN, ROOT, _kept, finders
from tests.mutations.fault import read_faults
from tests.stand_ins import STAND_INS


def test_every_fault_has_been_found() -> None:
    assert len(finders()) >= 60
    assert all(finders().values())


def test_no_test_that_found_a_fault_is_left_out(pytestconfig: pytest.Config) -> None:
    left_out = pytestconfig.stash.get(LEFT_OUT, frozenset())
    assert sorted(left_out & set(finders().values())) == []


def test_every_test_that_found_a_fault_is_still_there() -> None:
    assert sorted(test for test in {*finders().values()} if not is_there(test)) == []


def test_what_is_left_out_for_a_stand_in_is_there_and_the_stand_in_runs() -> None:
    found_faults = {each.partition("[")[0] for each in finders().values()}
    for test, other in STAND_INS.items():
        assert is_there(test), test
        assert is_there(other), other
        assert other not in STAND_INS, other
        assert test not in found_faults, test


def is_there(test: str) -> bool:
    path, _, name = test.partition("[")[0].partition("::")
    return re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE) is not None


def test_every_row_that_is_run_in_part_is_there() -> None:
    for row in ONE_IN:
        path, _, name = row.partition("::")
        assert f"def {name}" in (ROOT / path).read_text(encoding="utf-8"), row


def test_every_fault_can_still_be_made() -> None:
    """Code that was changed takes its faults along: one that no longer applies guards nothing."""
    for fault in read_faults():
        assert fault.applied_to((ROOT / fault.file).read_text(encoding="utf-8"))


def test_of_a_square_of_cases_those_run_that_meet_every_row_and_every_column() -> None:
    words = list(product("abcdef", "12345"))
    cases: list[Any] = [SimpleNamespace(nodeid="".join(each), callspec=SimpleNamespace(_idlist=each)) for each in words]
    kept = _kept(cases, 10, 0, {"f5"})
    assert {letter for letter, _ in (words[each] for each in kept)} == set("abcdef")
    assert {digit for _, digit in (words[each] for each in kept)} == set("12345")
    assert words.index(("f", "5")) in kept, "it has found a fault"
    assert len(kept) < len(words) / 2


@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize("second", ["c", "d"])
def test_a_case_tells_the_word_of_each_of_its_parameters(
    first: str, second: str, request: pytest.FixtureRequest
) -> None:
    assert set(request.node.callspec._idlist) == {first, second}
