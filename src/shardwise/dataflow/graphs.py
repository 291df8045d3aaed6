"""CUDA graphs of a recorded program: one per segment of a GPU's work, with events between them.

A graph starts as a whole, so every dependency of any of its steps must be met before all of them. Steps are therefore
cut into segments where one of them depends on another device:

    gpu 0   a1 a2 | a3         three graphs: a3 needs b1, so it is not in one graph with a1
    gpu 1      b1

Copies between GPUs, copies of unpinned memory and work of host threads are in no graph; they are issued between the
graphs one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.dataflow.cuda import CudaStream, new_stream
from shardwise.dataflow.data import Copy
from shardwise.dataflow.mover import Mover, Step
from shardwise.dataflow.streams import Event, Failures, Run, Stream, as_it_is, latest
from shardwise.torch_private import version_of


@dataclass(slots=True, kw_only=True)
class Segment:
    """Steps that start together, and the segments they depend on. `device` is None for steps that are in no graph."""

    device: int | None
    stream: Stream
    steps: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    graph: Any = None


def cut(steps: Sequence[Step]) -> list[Segment]:
    """Cut a program into segments. Each depends only on segments before it in the list."""
    segments: list[Segment] = []
    opened: dict[int | None, int] = {}
    home: list[int] = []
    for number, step in enumerate(steps):
        device = device_of(step)
        foreign = sorted({home[each] for each in step.after if segments[home[each]].device != device})
        for other in foreign:
            # A segment that another one waits for is closed: no more steps are added to it.
            if opened.get(segments[other].device) == other:
                del opened[segments[other].device]
        own = opened.get(device)
        if own is None or not set(foreign) <= set(segments[own].after):
            own = opened[device] = len(segments)
            before = [each for each, segment in enumerate(segments) if segment.device == device]
            segments.append(Segment(device=device, stream=step.stream, after=[*foreign, *before[-1:]]))
        segments[own].steps.append(number)
        home.append(own)
    return segments


def device_of(step: Step) -> int | None:
    """Return the GPU in whose graph a step goes, or None if it cannot be in a graph."""
    if not isinstance(step.stream, CudaStream) or not step.work.fits_graph:
        return None
    return step.stream.device_index


class Graphs:
    """A program's graphs, ready to be launched."""

    def __init__(self, steps: Sequence[Step], mover: Mover) -> None:
        self._steps = steps
        self._mover = mover
        self._segments = [_captured(each, steps) for each in cut(steps)]
        self._end: Event | None = None  # The last event of the last launch.

    def launch(self, start: Sequence[Event]) -> list[Event]:
        """Launch all segments behind some events, and return the event of each step."""
        self._mover.num_changes += 1
        ends: list[list[Event]] = []
        events: dict[int, Event] = {}
        for segment in self._segments:
            after = latest([*start, *(event for other in segment.after for event in ends[other])])
            if segment.graph is not None:
                event = segment.stream.put(segment.graph.replay, after, as_it_is)
                events |= dict.fromkeys(segment.steps, event)
                ends.append([event])
            else:
                for number in segment.steps:
                    step = self._steps[number]
                    known = latest([*after, *(events[each] for each in step.after)])
                    events[number] = self._mover.put(step.stream, step.run, known, step.blame, step.work)
                ends.append(latest([events[each] for each in segment.steps]))
        self._end = ends[-1][-1]
        return [events[number] for number in range(len(self._steps))]

    def relaunch(self, failures: Failures, needs: Sequence[Copy]) -> "Relaunch | None":
        """Return how to launch a single graph again if nothing else happens.

        None if there are several segments, or if its launch still waits for a thread.
        """
        segment, end = self._segments[0], self._end
        if len(self._segments) > 1 or segment.graph is None or end is None or end.cuda_event is None:
            return None
        assert isinstance(segment.stream, CudaStream), "only a GPU's steps are in a graph"
        watched = [(copy.imported, copy.imported_version) for copy in needs if copy.imported is not None]
        mover = self._mover
        return Relaunch(segment.graph.replay, segment.stream, end, mover, failures, watched, mover.num_changes)


@dataclass(slots=True, eq=False)
class Relaunch:
    """Launches a graph directly behind its last launch, and reuses the event of that launch.

    All copies point to that event already, so nothing has to be updated per copy. The overhead of a replay, beside the
    graph itself, is four checks on the host and none on the GPU.
    """

    replay: Run
    stream: CudaStream
    end: Event
    mover: Mover
    failures: Failures
    watched: Sequence[tuple[Tensor, int]]  # Users' tensors and their versions.
    num_changes: int

    def run(self) -> bool:
        """Launch if the machine did nothing else since and users' tensors are unchanged. Returns whether it did."""
        mover = self.mover
        if mover.num_changes != self.num_changes or self.failures.first is not None or not self.stream.is_current():
            return False
        for tensor, version in self.watched:
            if version_of(tensor) != version:
                return False
        self.stream.relaunch(self.replay, self.end)
        mover.num_changes += 1
        self.num_changes = mover.num_changes
        return True


def _captured(segment: Segment, steps: Sequence[Step]) -> Segment:
    """Return the segment with its steps captured in a graph. They have run before, so kernels are compiled."""
    if segment.device is None:
        return segment
    streams = {steps[each].stream for each in segment.steps}
    used = [stream for stream in streams if isinstance(stream, CudaStream)]
    computing = [each for each in used if each.name.endswith("compute")]
    beside = [each for each in used if each not in computing]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(segment.device):
        # A stream that may be a thread's current one cannot be captured: capture the compute steps on a side stream.
        side = new_stream(torch.device("cuda", segment.device))
        before = [(each, each.cuda, each.last, each.spare) for each in used]
        for each in used:
            each.spare = None  # Events of a capture are meaningless outside of it.
        for each in computing:
            each.turn_to(side)
        try:
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                for each in beside:
                    each.cuda.wait_stream(side)
                _put(segment, steps)
                for each in beside:
                    side.wait_stream(each.cuda)
        finally:
            for each, stream, last, spare in before:
                each.turn_to(stream)
                each.last, each.spare = last, spare
    return replace(segment, stream=(computing or beside)[0], graph=graph)


def _put(segment: Segment, steps: Sequence[Step]) -> None:
    events: dict[int, Event] = {}
    for number in segment.steps:
        step = steps[number]
        after = [events[each] for each in step.after if each in events]
        assert isinstance(step.stream, CudaStream), "only a GPU's steps are in a graph"
        events[number] = step.stream.put(step.run, after, step.blame, is_captured=True)
