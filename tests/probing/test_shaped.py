"""A probe over links whose rates are known, because they were set: network namespaces on one machine."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.probing.namespaces import find_hindrance


def told_by(program: str, *words: object) -> dict[str, Any]:
    hindrance = find_hindrance()
    if hindrance is not None:
        pytest.skip(hindrance)
    done = subprocess.run(
        [sys.executable, "-m", f"tests.probing.{program}", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.whole
def test_neighbours_and_a_slow_link_are_found_over_shaped_links_and_a_cluster_is_made() -> None:
    found = told_by("shaped", 4, 2, "devices", "links")
    assert found["hosts"] == 4
    assert found["neighbours"] == [[0, 1], [2, 3]]
    assert found["slow"] == [[1, 3]]
    # On a busy machine messages are late, and links look slower than they are.
    assert np.median(np.abs(found["errors"])) < 0.05
    assert (found["cluster"], found["domain"]) == ("4x1xprocessor", 2)


@pytest.mark.whole
def test_sixteen_ranks_have_every_link_within_five_percent_of_what_was_set() -> None:
    found = told_by("shaped", 16, 4, "links")
    assert found["neighbours"] == [list(range(start, start + 4)) for start in (0, 4, 8, 12)]
    assert found["slow"] == [[1, 15]]
    assert np.abs(found["errors"]).max() < 0.05


@pytest.mark.whole
def test_a_step_is_faster_where_ranks_sit_best_and_its_numbers_are_the_same(tmp_path: Path) -> None:
    found = told_by("seated", tmp_path)
    assert found["seated"]["loss"] == found["plain"]["loss"]
    assert found["seated"]["tokens_per_second"] > 1.3 * found["plain"]["tokens_per_second"]
