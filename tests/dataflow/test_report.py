"""Reports: what a run took, where the time went, and that its bound is one."""

import random
from itertools import permutations

import pytest
import torch

from shardwise.dataflow.journal import Note, Work
from shardwise.dataflow.links import Link
from shardwise.dataflow.machine import Machine
from shardwise.dataflow.report import least_seconds
from shardwise.trace.attribution import Cause
from shardwise.trace.events import Lane
from shardwise.trace.perfetto import to_perfetto


def best_makespan(notes: list[Note]) -> float:
    """The shortest of all orders, each played out."""
    best = float("inf")
    for order in permutations(range(len(notes))):
        ends: dict[int, float] = {}
        free: dict[str, float] = {}
        for number in order:
            note = notes[number]
            if any(each not in ends for each in note.waits):
                break
            start = max([free.get(note.stream, 0.0), *(ends[each] for each in note.waits)])
            ends[number] = free[note.stream] = start + note.end - note.start
        else:
            best = min(best, max(ends.values()))
    return best


@pytest.mark.parametrize("seed", range(30))
def test_no_order_is_shorter_than_the_bound(seed: int) -> None:
    die = random.Random(seed)
    notes = []
    for number in range(6):
        waits = tuple(sorted(die.sample(range(number), min(number, die.randint(0, 2)))))
        work = Work(name="work", lane=Lane.COMPUTE, place=0)
        seconds = float(die.randint(1, 5))
        notes.append(Note(work=work, stream=die.choice("ab"), waits=waits, before=-1, start=0.0, end=seconds))
    assert least_seconds(notes) <= best_makespan(notes) + 1e-9


def test_a_report_says_where_the_time_went() -> None:
    with Machine(["cpu:0", "cpu:1"], links=Link(bytes_per_second=40.0)) as machine:
        x, y, z = machine.data(torch.ones(10), name="x"), machine.empty((10,), name="y"), machine.empty((10,), name="z")
        machine.submit(torch.neg, x, into=y, place="cpu:0", seconds=2.0, name="first")
        machine.submit(torch.neg, y, into=z, place="cpu:1", seconds=3.0, name="second")
        report = machine.report("two tasks")
    assert report.makespan_seconds == 1 + 2 + 1 + 3
    assert [event.name for event in report.critical_path] == ["x", "first", "y", "second"]
    assert report.moved_bytes == {("host", "cpu:0"): 40, ("cpu:0", "cpu:1"): 40}
    assert (report.total_bytes, report.num_transfers) == (80, 2)
    assert report.efficiency == 1.0
    assert report.overlap == 0.0
    assert report.stalls["cpu:0"][Cause.COOL_DOWN] == 4.0
    assert report.stalls["cpu:1"][Cause.WARM_UP] == 4.0
    assert report.places == ("cpu:0", "cpu:1", "host", "disk")
    assert to_perfetto(report.trace)


def test_a_run_without_links_is_measured() -> None:
    with Machine(["cpu:0", "cpu:1"], trace=True) as machine:
        x, y = machine.data(torch.ones(10), name="x"), machine.empty((10,), name="y")
        machine.submit(torch.neg, x, into=y, place="cpu:0", name="task")
        machine.submit(torch.neg, y, into=x, place="cpu:1", name="task")
        report = machine.report()
    assert [event.name for event in report.trace.events] == ["x", "task", "y", "task"]
    starts = [event.start for event in report.trace.events]
    assert starts == sorted(starts)
    assert all(event.end >= event.start for event in report.trace.events)
    assert 0 < report.least_seconds <= report.makespan_seconds


def test_reckoned_time_is_the_same_however_the_streams_run() -> None:
    def makespan(seed: int) -> float:
        with Machine(["cpu:0"], budget={"cpu:0": 120}, links=Link(bytes_per_second=40.0)) as machine:
            die = random.Random(seed)
            x = machine.empty((10,))
            machine.submit(torch.zeros, 10, into=x, place="cpu:0", seconds=1.0)
            for _ in range(20):
                weight = machine.data(torch.ones(10))
                machine.submit(torch.add, x, weight, into=x, place="cpu:0", seconds=1.0)
                if die.random() < 0.5:
                    machine.place("cpu:0").compute.last.wait()  # type: ignore[union-attr]
            return machine.report().makespan_seconds

    assert {makespan(seed) for seed in range(5)} == {21.0}
