"""Programs of graphs, on a GPU that is played: streams are lists of what they were told, graphs are names."""

import sys
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch

from shardwise.dataflow import cuda
from shardwise.dataflow.cuda import CudaStream
from shardwise.dataflow.graphs import Graphs
from shardwise.dataflow.journal import Work
from shardwise.dataflow.machine import Machine
from shardwise.dataflow.mover import Step
from shardwise.dataflow.streams import Failures
from shardwise.testing.rehearsal import Rehearsal
from shardwise.trace.events import Lane
from tests.dataflow.played import PlayedStream, play


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a GPU was told, in order."""
    return play(monkeypatch)


def make_steps(log: list[str], told: Sequence[tuple[str, str, Lane, tuple[int, ...]]]) -> list[Step]:
    """Steps by name: a stream, a lane, and the steps before them."""
    streams: dict[str, CudaStream] = {}
    for name in sorted({stream for _, stream, _, _ in told}):
        played: Any = PlayedStream(name, log)
        played.device_index = int(name[-1])
        streams[name] = CudaStream(name, played, Failures())

    return [
        Step(
            streams[stream],
            partial(log.append, name),
            after,
            lambda error: error,
            Work(name=name, lane=lane, place=0, peer=1, fits_graph=lane is not Lane.SEND),
        )
        for name, stream, lane, after in told
    ]


def test_one_gpu_is_one_graph_and_a_relaunch_is_one_line(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "raw_stream", lambda _: "gpu0")
    told = [("a", "gpu0", Lane.COMPUTE, ()), ("b", "gpu0", Lane.COMPUTE, (0,))]
    with Machine(["cpu:0"]) as machine:
        program = Graphs(make_steps(log, told), machine.mover)
        events = program.launch([])
        assert events[0] is events[1]
        cuda_event: Any = events[0].cuda_event
        again = program.relaunch(machine.failures, [])
        assert again is not None
        assert again.run()
        assert log == ["graph of ab", "a", "b"] * 2
        # Whoever waits for the program now waits for its last launch.
        assert (events[0].number, cuda_event.name) == (2, "gpu0.2")
        machine.mover.num_changes += 1  # Somebody was here.
        assert not again.run()


def test_before_a_graph_is_launched_again_hardly_anything_is_called(log: list[str]) -> None:
    """What a replay costs beside its graph is what stands before the launch."""
    with Machine(["cuda:0"]) as machine:
        x = machine.data(torch.ones(4))
        program = machine.record(lambda: machine.submit(torch.mul, x, 2.0, into=x, place="cuda:0", name="a"))
        program.replay()
        program.replay()
        called: list[str] = []

        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and not log:
                called.append(frame.f_code.co_name)

        del log[:]
        sys.setprofile(note)
        try:
            program.replay()
        finally:
            sys.setprofile(None)
        assert log[0] == "graph of a"
        assert called[:4] == ["replay", "run", "is_current", "<lambda>"]  # The last is the played GPU's.
        assert called[4:6] == ["relaunch", "replay"]  # And that is the graph's own.
        assert x.get().tolist() == [16.0] * 4


def test_two_gpus_are_graphs_with_events_and_copies_between_them(log: list[str]) -> None:
    """The copy between the GPUs is in no graph: it waits for the first, and the second waits for it."""
    told = [
        ("a", "gpu0", Lane.COMPUTE, ()),
        ("copy", "out0", Lane.SEND, (0,)),
        ("b", "gpu1", Lane.COMPUTE, (1,)),
        ("c", "gpu1", Lane.COMPUTE, (2,)),
    ]
    with Machine(["cpu:0"]) as machine:
        program = Graphs(make_steps(log, told), machine.mover)
        events = program.launch([])
        assert program.relaunch(machine.failures, []) is None
    assert log == [
        *("graph of a", "a"),
        *("out0 waits for gpu0.1", "copy"),
        *("gpu1 waits for out0.1", "graph of bc", "b", "c"),
    ]
    assert [event.stream.name for event in events] == ["gpu0", "out0", "gpu1", "gpu1"]


def test_a_launch_comes_after_what_used_the_same_buffers(log: list[str]) -> None:
    told = [("a", "gpu0", Lane.COMPUTE, ()), ("b", "in0", Lane.RELOAD, ())]
    steps = make_steps(log, told)
    with Machine(["cpu:0"]) as machine:
        before = steps[1].stream.put(lambda: log.append("before"), (), lambda error: error)
        Graphs(steps[:1], machine.mover).launch([before])
    assert log == ["before", "gpu0 waits for in0.1", "graph of a", "a"]


def test_a_recorded_chain_on_a_gpu_is_one_graph_that_is_launched_again(log: list[str]) -> None:
    with Machine(["cuda:0"]) as machine:
        x, total = machine.data(torch.ones(4)), machine.empty((4,))
        machine.submit(torch.zeros, 4, into=total, place="cuda:0")

        def body() -> None:
            machine.submit(torch.add, total, x, into=total, place="cuda:0", name="a")
            machine.submit(torch.mul, total, 2.0, into=total, place="cuda:0", name="b")

        program = machine.record(body)
        assert (program.kind, program.problem) == ("graphs", None)
        del log[:]
        for _ in range(3):
            program.replay()
        assert [line for line in log if "graph" in line] == ["graph of ab"] * 3
        assert [line for line in log if "waits" in line] == ["compute waits for copy.1"]  # For x, the first time.
        seen = machine.empty((4,))
        machine.submit(torch.neg, total, into=seen, place="host")
        assert seen.get().tolist() == [-30.0] * 4


@pytest.mark.parametrize("seed", range(6))
def test_random_programs_are_right_with_a_gpu_among_their_places(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch)
    rehearsal = Rehearsal(seed, devices=["cuda:0", "cpu:0", "cpu:1"])
    rehearsal.run(150)
    rehearsal.close()
