"""What `make test` leaves out guards nothing alone: every seeded fault is found by a test that it runs."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from tests.left_out import LEFT_OUT

ROOT = Path(__file__).parents[2]


@cache
def finders() -> dict[str, str]:
    """For each seeded fault, the test that found it when the faults were last tried."""
    results = json.loads((ROOT / "benchmarks" / "results" / "mutations.json").read_text(encoding="utf-8"))["results"]
    return {fault: row["test"] for fault, row in results["new"]["faults"].items()}


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
