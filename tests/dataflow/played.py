"""A GPU that is played: its streams do at once what they are told and write it down, its memory is the CPU's.

What is ours about a GPU is thereby run without one: who waits for whom, what is issued behind a thread, what is in a
graph. What is CUDA's own is not.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from shardwise.dataflow import choice, cuda, graphs, mover, place
from shardwise.dataflow.buffers import device_memory
from shardwise.dataflow.graphs import Segment
from shardwise.dataflow.mover import Step


class PlayedEvent:
    """Its name is its stream's and how many were recorded there."""

    name = "not recorded"

    def record(self, stream: "PlayedStream | None" = None) -> None:
        if stream is not None:
            stream.num_events += 1
            self.name = f"{stream.cuda_stream}.{stream.num_events}"

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "PlayedEvent") -> float:  # noqa: ARG002
        return 1.0


class PlayedStream:
    """Writes down whom it is told to wait for."""

    device_index = 0

    def __init__(self, name: object, log: list[str]) -> None:
        self.cuda_stream, self.log, self.num_events = name, log, 0

    def wait_event(self, event: PlayedEvent) -> None:
        assert event.name != "not recorded", "CUDA would not wait at all for an event that is not recorded"
        self.log.append(f"{self.cuda_stream} waits for {event.name}")

    def synchronize(self) -> None:
        pass


class PlayedGraph:
    """Runs its steps, one after another."""

    def __init__(self, segment: Segment, steps: Sequence[Step], log: list[str]) -> None:
        self.steps = [steps[each] for each in segment.steps]
        self.log = log

    def replay(self) -> None:
        self.log.append(f"graph of {''.join(step.work.name for step in self.steps)}")
        for step in self.steps:
            step.run()


def play(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have one GPU, `cuda:0`. What it is told is in the list."""
    log: list[str] = []

    def captured(segment: Segment, steps: Sequence[Step]) -> Segment:
        return segment if segment.device is None else replace(segment, graph=PlayedGraph(segment, steps, log))

    cpu = device_memory(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: PlayedStream("compute", log))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(cuda, "current_gpu", lambda: 0)
    monkeypatch.setattr(cuda, "raw_stream", lambda _: "compute")
    for module in (cuda, choice):
        monkeypatch.setattr(module, "new_event", lambda times: PlayedEvent())  # noqa: ARG005
    for module in (place, mover):
        monkeypatch.setattr(module, "new_stream", lambda _: PlayedStream("copy", log))
    monkeypatch.setattr(place, "device_memory", lambda _: cpu)
    monkeypatch.setattr(place, "host_memory", lambda is_pinned: cpu)  # noqa: ARG005
    monkeypatch.setattr(graphs, "_captured", captured)
    return log
