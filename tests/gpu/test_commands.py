"""Commands that go on from each other begin first, and nobody holds a place who waits."""

import math
import threading
import time
from pathlib import Path

import pytest

from tests.gpu import commands
from tests.gpu.commands import Case, Row, longest_chain_first, row_of_all, run_recorded, try_all
from tests.gpu.record import Record


def case(name: str, *after: str, processes: int = 1) -> Case:
    return Case(name=name, words=name, holds=lambda _: None, after=after, processes=processes)


CHAIN = [case("short"), case("wide", processes=4), case("a"), case("b", "a"), case("c", "b"), case("d", "b")]


def test_the_longest_chain_begins_first() -> None:
    assert [each.name for each in longest_chain_first(CHAIN)] == ["a", "b", "wide", "short", "c", "d"]


def test_each_is_tried_after_what_it_goes_on_from_and_places_are_enough() -> None:
    lock, now, most, order = threading.Lock(), [0], [0], list[str]()

    def try_it(each: Case) -> Row:
        with lock:
            order.append(each.name)
            now[0] += each.processes
            most[0] = max(most[0], now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= each.processes
        return Row(name=each.name, command=each.words)

    rows = try_all(CHAIN, try_it, places=4, jobs=6)
    assert [row.name for row in rows] == [each.name for each in CHAIN]
    assert most[0] <= 4
    assert order.index("a") < order.index("b") < min(order.index("c"), order.index("d"))


def test_what_goes_on_from_a_failure_fails_and_no_case_is_begun_too_late() -> None:
    rows = try_all(CHAIN, lambda each: Row(name=each.name, command="", problem="gone"), places=4, jobs=6)
    assert {row.name: row.problem for row in rows}["c"] == "b failed, from which it goes on"
    assert try_all(CHAIN, lambda each: Row(name=each.name, command=""), places=4, jobs=6, deadline=0.0) == []


def test_a_call_that_goes_on_tries_again_only_what_others_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def run(each: Case, *_: object) -> Row:
        tried.append(each.name)
        return Row(name=each.name, command="", seconds=2.0)

    monkeypatch.setattr(commands, "cases", lambda _: CHAIN)
    monkeypatch.setattr(commands, "run", run)
    record = Record(tmp_path / "record", known={})
    for name in ("short", "a", "b", "d"):
        record.add(f"commands: {name}", {"name": name, "status": 0, "seconds": 1.0})
    run_recorded(record, [1], 4, math.inf)
    assert sorted(tried) == ["a", "b", "c"]
    assert row_of_all(record) == []
    run_recorded(record, [4], 4, math.inf)
    assert tried[3:] == ["wide"]
    (row,) = row_of_all(Record(tmp_path / "record", known={}))
    assert (row["status"], row["seconds"]) == (0, 1.0 + 1.0 + 3 * 2.0 + 2.0)
