"""What ranks that are processes do beside training rightly: hold no more than their part, and end what they began."""

from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.ranks.spawn import Ranks
from tests.conformance.cases import Case, make_module
from tests.conformance.processes import make_engine, on_one_rank

CASE = Case(model="gpt-neox", schedule="1f1b", num_ranks=2, num_microbatches=2, lengths=(6,))
TASKS = Path("/proc/self/task")


def held(case: Case) -> int:
    """How many parameters are in memory of this rank."""
    with make_engine(case) as engine:
        return sum(each.numel() for each in engine.module.parameters() if each.device.type != "meta")


def test_no_rank_holds_the_whole_model(two: Ranks) -> None:
    whole = sum(each.numel() for each in make_module(CASE.model).parameters())
    parts = two.run(held, CASE)
    assert sum(parts) <= whole * 1.01
    assert max(parts) < whole


def num_threads_after(cases: list[Case]) -> list[int]:
    counts = []
    for case in cases:
        on_one_rank(case)
        counts.append(len(list(TASKS.iterdir())))
    return counts


@pytest.mark.skipif(not TASKS.exists(), reason="threads are counted in /proc")
def test_a_closed_engine_leaves_no_thread_of_its_groups(two: Ranks) -> None:
    """Each group has threads and connections, and hundreds of engines are made on the same ranks here."""
    cases = [replace(CASE, model="tied-and-skipping", schedule=each) for each in ("1f1b", "zb-h1", "1f1b", "zb-h1")]
    for counts in two.run(num_threads_after, cases):
        assert counts[1:] == counts[:1] * 3
