"""What the GPU of a rank does in a step, seen by torch's profiler: kernels, NCCL, copies, each with its stream.

CUPTI notes when each began and ended by the device's clock and tells it by the host's, and which call of the host
launched it. By when that call was, an activity belongs to an instruction, and a collective to what asked for it.
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

#: How kernels of NCCL are called, by the kind of the collective.
_KERNELS = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_to_all": "SendRecv",
}
#: A collective is launched right after it is noted; what comes much later belongs to nothing that was noted.
_SOON_SECONDS = 0.02
_NUM_LOOKS = 5


class DeviceEvent(NamedTuple):
    """What torch's profiler has seen: something on the device, or (`stream` None) a call of the host that launched it.

    Times are nanoseconds since 1970. What was launched has the `correlation` of the call that launched it.
    """

    name: str
    stream: int | None
    start: int
    end: int
    correlation: int


class StreamCollector:
    """Sees what a GPU does from `start` to `stop`, once. `ended` is when all of it was done, by the host's clock.

    `cost_seconds` is what starting and reading have taken, which is no part of what is between.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.profiler = DeviceProfiler()
        self._seen: list[DeviceEvent] = []
        self._zero = 0
        self.ended = 0.0
        self.cost_seconds = 0.0

    def start(self) -> None:
        """Begin to look, when nothing is under way."""
        torch.cuda.synchronize(self._device)
        begin = perf_counter()
        self.profiler.start()
        self.cost_seconds += perf_counter() - begin

    def stop(self) -> None:
        """Wait for the device, and take down what it did."""
        torch.cuda.synchronize(self._device)
        self.ended = perf_counter()
        self._zero = zero_of_clock()
        self._seen = device_events(self.profiler.stop())
        self.cost_seconds += perf_counter() - self.ended

    def activities(self, rank: int, handed_over: Sequence[Ran], launches: Sequence[Launch]) -> list[Activity]:
        """What was seen, as a rank tells it; `handed_over` are its instructions by the host's clock."""
        return activities_of(self._seen, rank=rank, zero=self._zero, handed_over=handed_over, launches=launches)


def zero_of_clock() -> int:
    """When the host's clock was at zero, in nanoseconds since 1970. Of several looks the quickest is the best."""
    looks = []
    for _ in range(_NUM_LOOKS):
        before, now, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        looks.append((after - before, now - (before + after) // 2))
    return min(looks)[1]


def activities_of(
    seen: Sequence[DeviceEvent], *, rank: int, zero: int, handed_over: Sequence[Ran], launches: Sequence[Launch]
) -> list[Activity]:
    """What a profiler has seen, as activities by the host's clock, whose zero is at `zero` nanoseconds since 1970.

    `handed_over` are the rank's instructions, and `launches` its collectives, when the host came to them.
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
    """By how many nanoseconds the device's clock is told too early, at least: nothing runs before it was launched.

    Without this a batch that is copied first of all may seem to have been copied before its step began.
    """
    early = (
        calls[each.correlation] - each.start for each in seen if each.stream is not None and each.correlation in calls
    )
    return max(0, *early, 0)


def _with_purposes(activities: Sequence[Activity], launches: Sequence[Launch]) -> list[Activity]:
    """Say of each collective which of those that were noted it is: the first of its kind to be launched after the note.

    Where it is not known when they were launched they are taken in order, if there are as many as were noted.
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
    """Kineto's events as values. Calls of the host are told from what ran by their device."""
    found = []
    names: dict[str, str] = {}  # Kernels come again and again: one text of each is enough to keep and to send.
    for each in seen:
        is_device = each.device_type() == torch.profiler.DeviceType.CUDA
        stream, start = each.device_resource_id() if is_device else None, each.start_ns()
        name = names.setdefault(each.name(), each.name())
        found.append(DeviceEvent(name, stream, start, start + each.duration_ns(), each.correlation_id()))
    return found
