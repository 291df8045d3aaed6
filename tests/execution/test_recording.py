"""What is noted becomes a trace; on a device that works by itself, by the device's time and not by the host's."""

import pickle
from collections.abc import Sequence

import pytest
import torch

from shardwise.execution.recording import RankTrace, Recording, clock_of
from shardwise.schedule.catalogue import make_schedule
from shardwise.schedule.instruction import backward, forward
from shardwise.schedule.passes.lower import lower
from shardwise.trace.events import Holding, Lane, Traffic
from shardwise.trace.stretches import Part, parts_of_ranks


class FakeDevice:
    """A device whose marks come at times that are known beforehand."""

    def __init__(self, *times: float) -> None:
        self._times, self._count = times, 0

    def mark(self) -> int:
        self._count += 1
        return self._count - 1

    def times(self, marks: Sequence[int]) -> list[float]:
        return [self._times[mark] for mark in marks]


def test_an_instruction_begins_when_it_is_handed_over_or_when_what_was_before_it_has_ended() -> None:
    schedule = lower(make_schedule("1f1b", 1, 1))
    # The host hands everything over in 3 ms; the device is busy for 100.
    recording = Recording(schedule, clock=FakeDevice(0.040, 0.060, 0.090, 0.095, 0.100))
    recording.note(0, forward(0, 0), 0.001, 0.002)
    recording.note_again(0, backward(0, 0), 0.002, 0.0022)
    recording.note(0, backward(0, 0), 0.002, 0.003)
    recording.note_wait("a sum of gradients", 1, 0.0031, 0.0032)
    recording.note_step(0, 0.003, 0.004)
    recording.settle()
    recording.take(0, recording.told_by(0, (0.0, 0.005)))
    trace = recording.trace()
    spans = {(event.name, event.lane): (event.start, event.end) for event in trace.events}
    assert spans["0F0", Lane.COMPUTE] == pytest.approx((0.001, 0.040))
    assert spans["0B0", Lane.RECOMPUTE] == pytest.approx((0.040, 0.060))
    assert spans["0B0", Lane.COMPUTE] == pytest.approx((0.040, 0.090))
    assert spans["a sum of gradients", Lane.WAIT] == pytest.approx((0.090, 0.095))
    assert spans["0STEP0", Lane.STEP] == pytest.approx((0.090, 0.100))
    assert trace.windows[0] == pytest.approx((0.0, 0.100))
    (parts,) = parts_of_ranks(trace)
    assert parts[Part.RECOMPUTATION] == pytest.approx(0.020)
    assert parts[Part.OPTIMIZER] == parts[Part.EXPOSED] == pytest.approx(0.005)
    assert sum(parts.values()) == pytest.approx(0.100)


def test_where_the_host_computes_itself_its_own_times_stand() -> None:
    assert clock_of([torch.zeros(1)]) is None
    assert clock_of([]) is None
    recording = Recording(lower(make_schedule("1f1b", 1, 1)))
    recording.note(0, forward(0, 0), 1.0, 2.0)
    recording.settle()
    recording.take(0, recording.told_by(0, (0.5, 3.0)))
    (event,) = recording.trace().events
    assert (event.start, event.end) == (0.5, 1.5)


def test_what_a_rank_tells_arrives_as_it_was() -> None:
    recording = Recording(lower(make_schedule("1f1b", 1, 2)))
    recording.note(0, forward(0, 0), 1.0, 2.0)
    recording.note_wait("a sum of gradients", 1, 2.0, 2.5)
    holdings, traffic = [Holding(0, "parameters", 1.0, 8.0)], [Traffic(0, None, "all_reduce", 1, 64)]
    for told in (
        recording.told_by(0, (0.5, 3.0), data_wait=0.1, holdings=holdings, traffic=traffic),
        Recording(lower(make_schedule("1f1b", 1, 2))).told_by(0),
    ):
        assert RankTrace.unpacked(pickle.loads(pickle.dumps(told.packed()))) == told


def test_by_another_clock_all_that_a_rank_tells_is_as_much_later() -> None:
    recording = Recording(lower(make_schedule("1f1b", 1, 2)))
    recording.note(0, forward(0, 0), 1.0, 2.0)
    recording.note_wait("a sum of gradients", 1, 2.0, 2.5)
    told = recording.told_by(0, (0.5, 3.0), holdings=[Holding(0, "parameters", 1.0, 8.0)])
    later = told.by_clock(10.0)
    assert later.window == (10.5, 13.0)
    assert [(each.start, each.end) for each in later.spans] == [(11.0, 12.0), (12.0, 12.5)]
    assert [each.time for each in later.holdings] == [11.0]
    assert later.by_clock(-10.0) == told
