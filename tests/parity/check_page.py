"""docs/check.md: how many faults of each kind it says that there are."""

import re
from collections import Counter
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "check.md"
_ROW = re.compile(r"\| (?P<kind>[^|]+) \| (?P<count>\d+) \| (?P<found>\d+) \|")


def counts_of_page() -> Counter[str]:
    """By kind, those of which all were found."""
    rows = [match for match in map(_ROW.match, PAGE.read_text(encoding="utf-8").splitlines()) if match]
    assert all(row["count"] == row["found"] for row in rows), "the page says that some were not found"
    return Counter({row["kind"]: int(row["count"]) for row in rows})
