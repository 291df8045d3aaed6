"""Choose the place of a task with `place="auto"`: the device at which it would finish first.

The estimate adds up the work queued at a place, the transfers of missing inputs and the task itself. The time of a task
at a place is measured when it runs there; the time of a link is measured once, by copying. Where links are given, both
are computed from the given numbers instead.
"""

from functools import partial
from time import perf_counter
from typing import Any

from shardwise.dataflow.cuda import new_event
from shardwise.dataflow.launch import Call
from shardwise.dataflow.links import Link, linked_pairs
from shardwise.dataflow.mover import Mover
from shardwise.dataflow.place import Kind, Place
from shardwise.dataflow.streams import Run

_SMALL_BYTES, _LARGE_BYTES = 4 * 2**10, 8 * 2**20
_MOST_CHUNKS = 32
_KEPT = 0.8  # Weight of the old average when a new measurement arrives.

#: A function, and the place where it ran.
_Key = tuple[object, int]


class Chooser:
    """Chooses places, and keeps a running average of how long each task takes at each place."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._devices = [place for place in mover.places if place.is_device]
        self._seconds: dict[_Key, float] = {}
        self._running: list[tuple[_Key, Any, Any]] = []  # GPU tasks, each between two timing events.
        self._is_measured = bool(mover.routes.links)

    def choose(self, call: Call) -> Place:
        """Return the device at which the task would finish first."""
        if len(self._devices) == 1:
            return self._devices[0]
        if not self._is_measured:
            measure_links(self._mover)
            self._is_measured = True
        self._collect()
        # Ties go to the place that needs fewer bytes transferred.
        ends = [(*self._end(call, place), place.index) for place in self._devices]
        end, _, index = min(ends)
        place = self._mover.places[index]
        if self._mover.reckoned is None:
            place.compute.tail_seconds = end
        return place

    def measured(self, call: Call, place: Place, run: Run) -> Run:
        """Return the run, wrapped with a timer if its time is needed to choose places."""
        if call.place != "auto" or self._mover.reckoned is not None or len(self._devices) == 1:
            return run
        key = (call.launch.key, place.index)
        if place.kind is Kind.GPU:
            return partial(self._run_on_gpu, key, run)
        return partial(self._run_by_thread, key, run)

    def _end(self, call: Call, place: Place) -> tuple[float, int]:
        """Return when the task would finish, after queued work and input transfers, and the bytes transferred."""
        reckoned = self._mover.reckoned
        now = perf_counter() if reckoned is None else reckoned.now_seconds
        arrival, ready, num_bytes = max(now, place.inward.tail_seconds), now, 0
        for data in call.reads:
            copy = data.copies[place.index]
            if copy is not None and copy.valid:
                ready = max(ready, copy.writer.end_seconds if copy.writer is not None else 0.0)
                continue
            sources = [(self._mover.places[each.place], each) for each in data.valid_copies]
            if not sources:
                continue  # The mover raises the error for data without a value.
            arrival = min(
                max(arrival, each.writer.end_seconds if each.writer is not None else 0.0)
                + self._mover.routes.seconds(source, place, data.num_bytes)
                for source, each in sources
            )
            ready = max(ready, arrival)
            num_bytes += data.num_bytes
        taken = self._seconds.get((call.launch.key, place.index), 0.0) if call.seconds is None else call.seconds
        return max(ready, place.compute.tail_seconds) + taken, num_bytes

    def _note(self, key: _Key, seconds: float) -> None:
        before = self._seconds.get(key)
        self._seconds[key] = seconds if before is None else _KEPT * before + (1 - _KEPT) * seconds

    def _run_by_thread(self, key: _Key, run: Run) -> None:
        start = perf_counter()
        run()
        self._note(key, perf_counter() - start)

    def _run_on_gpu(self, key: _Key, run: Run) -> None:
        begin, end = (new_event(times=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        self._running.append((key, begin, end))

    def _collect(self) -> None:
        """Record the times of GPU tasks that have finished."""
        while self._running and self._running[0][2].query():
            key, begin, end = self._running.pop(0)
            self._note(key, begin.elapsed_time(end) / 1000)


def measure_links(mover: Mover) -> None:
    """Time a small and a large copy over every link except the disk's, outside of all budgets, and keep the times."""
    moved = dict(mover.moved_bytes)
    sizes = min(_SMALL_BYTES, mover.chunk_bytes), min(_LARGE_BYTES, _MOST_CHUNKS * mover.chunk_bytes)
    for source, target in linked_pairs(mover.places):
        if Kind.DISK in (source.kind, target.kind):
            continue
        small, large = (_copy_seconds(mover, source, target, size) for size in sizes)
        mover.routes.links[source.index, target.index] = _link_of(sizes, (small, large))
    mover.moved_bytes = moved  # The bytes of measurements do not count as the program's.


def _link_of(sizes: tuple[int, int], seconds: tuple[float, float]) -> Link:
    """Return the link on which a small and a large copy take that long.

    The small copy of a machine with other work may be the longer one. Their difference would then be a link without
    limits, so the whole time of the large copy counts as that of its bytes.
    """
    (few, many), (small, large) = sizes, seconds
    if large < 2 * small:
        return Link(latency_seconds=min(small, large), bytes_per_second=many / large)
    return Link(latency_seconds=small, bytes_per_second=(many - few) / (large - small))


def _copy_seconds(mover: Mover, source: Place, target: Place, num_bytes: int) -> float:
    """Return the shortest of three copy times: the first copy also touches new memory."""
    tensors = [place.memory.allocate(num_bytes) for place in (source, target)]
    found = []
    for _ in range(3):
        start = perf_counter()
        mover.copy(tensors[1], target, tensors[0], source, (), "measurement").wait()
        found.append(perf_counter() - start)
    for place, tensor in zip((source, target), tensors, strict=True):
        place.memory.free(tensor)
    return min(found)
