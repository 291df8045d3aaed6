"""Collect the GPU activities of a rank in a step with torch's profiler: kernels, NCCL, copies, each with its stream.

CUPTI records start and end of each activity on the device's clock, converts them to the host's clock, and records which
host call launched the activity. The time of that call assigns an activity to an instruction, and an NCCL kernel to the
collective that was noted.
"""

import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch

from shardwise.execution.recording import Launch, Ran
from shardwise.torch_private import DeviceProfiler
from shardwise.trace.activities import Activity, ActivityKind, kind_of

#: The part of an NCCL kernel's name for each kind of collective.
_KERNELS = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_to_all": "SendRecv",
}
#: A collective is launched right after it is noted; a kernel launched much later matches no note.
_SOON_SECONDS = 0.02
_NUM_LOOKS = 5


class DeviceEvent(NamedTuple):
    """An event of torch's profiler: an activity on the device, or (`stream` None) the host call that launched one.

    Times are nanoseconds since 1970. An activity has the same `correlation` as the call that launched it.
    """

    name: str
    stream: int | None
    start: int
    end: int
    correlation: int


class StreamCollector:
    """Records the activities of a GPU from `start` to `stop`, once. `ended`: when the device was done (host clock).

    `cost_seconds` is the time spent starting and reading the profiler, which is not part of the recorded interval.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.profiler = DeviceProfiler()
        self._seen: list[DeviceEvent] = []
        self._zero = 0
        self.ended = 0.0
        self.cost_seconds = 0.0

    def start(self) -> None:
        """Wait until the device is idle, and start the profiler."""
        torch.cuda.synchronize(self._device)
        begin = perf_counter()
        self.profiler.start()
        self.cost_seconds += perf_counter() - begin

    def stop(self) -> None:
        """Wait for the device, and read the profiler's events."""
        torch.cuda.synchronize(self._device)
        self.ended = perf_counter()
        self._zero = zero_of_clock()
        self._seen = device_events(self.profiler.stop())
        self.cost_seconds += perf_counter() - self.ended

    def activities(self, rank: int, handed_over: Sequence[Ran], launches: Sequence[Launch]) -> list[Activity]:
        """Return the recorded activities of a rank; `handed_over` are its instructions by the host's clock."""
        return activities_of(self._seen, rank=rank, zero=self._zero, handed_over=handed_over, launches=launches)


def zero_of_clock() -> int:
    """Return the zero of the host's clock, in nanoseconds since 1970. Of several readings the quickest is the best."""
    looks = []
    for _ in range(_NUM_LOOKS):
        before, now, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        looks.append((after - before, now - (before + after) // 2))
    return min(looks)[1]


def activities_of(
    seen: Sequence[DeviceEvent], *, rank: int, zero: int, handed_over: Sequence[Ran], launches: Sequence[Launch]
) -> list[Activity]:
    """Turn profiler events into activities on the host's clock, whose zero is at `zero` nanoseconds since 1970.

    `handed_over` are the rank's instructions, and `launches` its collectives, with the times of their launch.
    """
    calls: dict[int, int] = {}
    for each in seen:
        if each.stream is None and each.correlation:
            calls[each.correlation] = min(each.start, calls.get(each.correlation, each.start))
    order = sorted((start, end, str(instruction)) for instruction, start, end in handed_over)
    starts = [start for start, _, _ in order]
    late = _clock_error(seen, calls)
    found = []
    for each in seen:
        if each.stream is None:
            continue
        call = calls.get(each.correlation)
        launched = None if call is None else (call - zero) / 1e9
        instruction = ""
        if launched is not None:
            place = bisect_right(starts, launched) - 1
            instruction = order[place][2] if place >= 0 and launched <= order[place][1] else ""
        times = (each.start + late - zero) / 1e9, (each.end + late - zero) / 1e9
        found.append(Activity(rank, each.stream, kind_of(each.name), each.name, *times, launched, instruction))
    found.sort(key=lambda each: (each.start, each.end))
    return _with_purposes(found, launches)


def _clock_error(seen: Iterable[DeviceEvent], calls: Mapping[int, int]) -> int:
    """Return a lower bound on how early device times are, in nanoseconds: no activity can start before its launch.

    Without this correction, the first copy of a batch may seem to have run before its step began.
    """
    early = (
        calls[each.correlation] - each.start for each in seen if each.stream is not None and each.correlation in calls
    )
    return max(0, *early, 0)


def _with_purposes(activities: Sequence[Activity], launches: Sequence[Launch]) -> list[Activity]:
    """Match each NCCL kernel with a noted collective: the first of its kind to be launched after the note.

    If launch times are unknown, match them in order, provided that there are as many kernels as notes.
    """
    found = list(activities)
    for kind, kernel in _KERNELS.items():
        noted = [each for each in launches if each.kind == kind]
        places = [
            place
            for place, each in enumerate(found)
            if each.kind is ActivityKind.NCCL and kernel in each.name and not each.purpose
        ]
        for place, launch in _pairs(places, [found[place].launched for place in places], noted):
            found[place] = found[place]._replace(purpose=launch.purpose, group=launch.group)
    return found


def _pairs(
    places: Sequence[int], launched: Sequence[float | None], noted: Sequence[Launch]
) -> Iterator[tuple[int, Launch]]:
    if any(each is None for each in launched):
        yield from zip(places, noted, strict=True) if len(places) == len(noted) else ()
        return
    taken = -1
    for time_of, place in sorted((time_of, place) for place, time_of in zip(places, launched, strict=True) if time_of):
        last = bisect_right(noted, time_of, key=lambda launch: launch.time) - 1
        if last > taken and time_of - noted[last].time < _SOON_SECONDS:
            yield place, noted[last]
            taken = last


def device_events(seen: Iterable[Any]) -> list[DeviceEvent]:
    """Return Kineto's events as values. The device type tells host calls from device activities."""
    found = []
    names: dict[str, str] = {}  # Interned: the same kernel names repeat, and each is kept and sent once.
    for each in seen:
        is_device = each.device_type() == torch.profiler.DeviceType.CUDA
        stream, start = each.device_resource_id() if is_device else None, each.start_ns()
        name = names.setdefault(each.name(), each.name())
        found.append(DeviceEvent(name, stream, start, start + each.duration_ns(), each.correlation_id()))
    return found
