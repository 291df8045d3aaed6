"""Programs: recorded once, replayed as they were, with new inputs, beside other tasks, and when memory is short."""

import random

import pytest
import torch
from torch import Tensor

from shardwise.dataflow.data import Data
from shardwise.dataflow.graphs import cut
from shardwise.dataflow.journal import Work
from shardwise.dataflow.links import Link
from shardwise.dataflow.machine import Machine
from shardwise.dataflow.mover import Step
from shardwise.dataflow.program import Program
from shardwise.dataflow.streams import Failures, ThreadStream
from shardwise.errors import ShardwiseError
from shardwise.trace.events import Lane
from tests.dataflow.machines import Shuffle

TWO = ["cpu:0", "cpu:1"]


def add(one: Tensor, other: Tensor) -> Tensor:
    return one + other


def accumulating(machine: Machine) -> tuple[Program, Data, Data]:
    """total += x, at one place after the other."""
    x, total = machine.data(torch.ones(4), name="x"), machine.data(torch.zeros(4), name="total")

    def body() -> None:
        machine.submit(add, total, x, into=total, place="cpu:0")
        machine.submit(add, total, x, into=total, place="cpu:1")

    return machine.record(body), x, total


@pytest.mark.parametrize("seed", range(5))
def test_a_replay_does_what_the_recording_did_again(seed: int) -> None:
    with Machine(TWO, make_stream=Shuffle(seed).make()) as machine:
        program, _, total = accumulating(machine)
        assert (program.kind, program.num_tasks) == ("list", 2)
        for _ in range(3):
            program.replay()
        assert total.get().tolist() == [8.0] * 4


@pytest.mark.parametrize("seed", range(5))
def test_a_replay_takes_new_inputs_and_works_beside_other_tasks(seed: int) -> None:
    with Machine(TWO, make_stream=Shuffle(seed).make()) as machine:
        program, x, total = accumulating(machine)
        seen = machine.empty((4,))
        x.set(torch.full((4,), 10.0))
        program.replay()
        machine.submit(torch.neg, total, into=seen, place="cpu:0")
        machine.submit(torch.neg, total, into=total, place="host")
        program.replay()
        assert seen.get().tolist() == [-22.0] * 4
        assert total.get().tolist() == [-2.0] * 4


def test_copies_made_since_the_recording_are_not_taken_for_the_new_value() -> None:
    with Machine(["cpu:0", "cpu:1", "cpu:2"]) as machine:
        program, _, total = accumulating(machine)
        machine.prefetch(total, "cpu:2")
        program.replay()
        seen = machine.empty((4,))
        machine.submit(torch.neg, total, into=seen, place="cpu:2")
        assert seen.get().tolist() == [-4.0] * 4


def test_a_replay_moves_the_bytes_of_the_program_and_no_more() -> None:
    with Machine(TWO) as machine:
        program, _, _ = accumulating(machine)
        before = dict(machine.mover.moved_bytes)
        program.replay()
        moved = {pair: size - before.get(pair, 0) for pair, size in machine.mover.moved_bytes.items()}
        assert {pair: size for pair, size in moved.items() if size} == {(0, 1): 16, (1, 0): 16}


def test_what_a_program_uses_stays_where_it_is_until_the_program_is_closed() -> None:
    with Machine(TWO, budget={"cpu:0": 64}) as machine:
        program, _, total = accumulating(machine)
        others = [machine.data(torch.ones(4)) for _ in range(4)]
        for other in others:
            machine.submit(torch.neg, other, into=other, place="cpu:0")
        program.replay()
        assert total.get().tolist() == [4.0] * 4
        too_large = machine.data(torch.ones(12), name="large")
        with pytest.raises(ShardwiseError, match="no room for large: 48 B are needed at cpu:0"):
            machine.prefetch(too_large, "cpu:0")
        program.close()
        machine.prefetch(too_large, "cpu:0")
        program.replay()
        assert (program.kind, total.get().tolist()) == ("tasks", [6.0] * 4)


@pytest.mark.parametrize("eviction", ["lru", "arc", "next-use"])
def test_a_program_larger_than_its_budget_is_dispatched_each_time(eviction: str) -> None:
    with Machine(["cpu:0"], budget={"cpu:0": 48}, eviction=eviction) as machine:
        weights = [machine.data(torch.full((4,), float(number))) for number in range(5)]
        total = machine.data(torch.zeros(4))

        def body() -> None:
            for weight in weights:
                machine.submit(add, total, weight, into=total, place="cpu:0")

        program = machine.record(body)
        program.replay()
        assert (program.kind, total.get().tolist()) == ("tasks", [20.0] * 4)


def test_a_replay_is_in_the_report_like_any_other_run() -> None:
    with Machine(TWO, links=Link(bytes_per_second=16.0)) as machine:
        program, _, _ = accumulating(machine)
        first = machine.report()
        program.replay()
        second = machine.report()
    assert len(second.trace.events) == len(first.trace.events) + 4  # Two tasks, and the total to and fro.
    assert second.makespan_seconds == pytest.approx(first.makespan_seconds + 2.0)


def test_a_tensor_changed_behind_a_programs_back_is_told() -> None:
    given = torch.ones(4)
    with Machine(["cpu:0"]) as machine:
        x, y = machine.data(given), machine.empty((4,))
        program = machine.record(lambda: machine.submit(torch.neg, x, into=y, place="host"))
        given.add_(1)
        with pytest.raises(ShardwiseError, match="was changed behind the machine's back"):
            program.replay()
        x.set(given)
        program.replay()
        assert y.get().tolist() == [-2.0] * 4


def test_a_recording_inside_of_another_is_refused() -> None:
    with Machine(["cpu:0"]) as machine:
        x = machine.data(torch.ones(4))

        def inner() -> None:
            machine.submit(torch.neg, x, into=x)

        with pytest.raises(ShardwiseError, match="a program is being recorded inside of another"):
            machine.record(lambda: machine.record(inner))


def steps_on(devices: list[int | None], waits: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    streams = {device: ThreadStream(f"{device}", Failures()) for device in devices}
    by_stream = {stream: device for device, stream in streams.items()}
    monkeypatch.setattr("shardwise.dataflow.graphs.device_of", lambda step: by_stream[step.stream])
    work = Work(name="step", lane=Lane.COMPUTE, place=0)
    return [
        Step(streams[device], lambda: None, after, lambda error: error, work)
        for device, after in zip(devices, waits, strict=True)
    ]


@pytest.mark.parametrize(
    ("devices", "waits", "expected"),
    [
        # One GPU: one graph.
        ([0, 0, 0], [(), (0,), (1,)], [(0, [0, 1, 2], [])]),
        # The drawing in `graphs.py`: a3 needs b1, which needs a2.
        ([0, 0, 1, 0], [(), (0,), (1,), (2,)], [(0, [0, 1], []), (1, [2], [0]), (0, [3], [1, 0])]),
        # Two GPUs that have nothing to do with each other.
        ([0, 1, 0, 1], [(), (), (0,), (1,)], [(0, [0, 2], []), (1, [1, 3], [])]),
        # A thread's work in between is in no graph, and ends what it waits for.
        ([0, None, 0, 0], [(), (0,), (), (1,)], [(0, [0], []), (None, [1], [0]), (0, [2], [0]), (0, [3], [1, 2])]),
    ],
)
def test_a_program_is_cut_where_one_device_needs_another(
    devices: list[int | None],
    waits: list[tuple[int, ...]],
    expected: list[tuple[int | None, list[int], list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    segments = cut(steps_on(devices, waits, monkeypatch))
    assert [(each.device, each.steps, each.after) for each in segments] == expected


def test_random_programs_are_cut_so_that_segments_depend_only_on_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(100):
        die = random.Random(seed)
        devices: list[int | None] = [die.choice([0, 1, 2, None]) for _ in range(40)]
        waits = [tuple(sorted({die.randrange(n) for _ in range(die.randint(0, 2))})) if n else () for n in range(40)]
        segments = cut(steps_on(devices, waits, monkeypatch))
        home = {step: number for number, segment in enumerate(segments) for step in segment.steps}
        assert sorted(home) == list(range(40))
        for number, segment in enumerate(segments):
            assert all(each < number for each in segment.after)
            for step in segment.steps:
                for other in waits[step]:
                    same = home[other] == number or segments[home[other]].device == segment.device
                    assert same or home[other] in segment.after
