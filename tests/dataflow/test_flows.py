"""Six reference flows: the bytes counted by hand, the same bits everywhere, and nearly the best possible makespan."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.dataflow.data import Data
from shardwise.dataflow.links import Link
from shardwise.dataflow.machine import Machine
from shardwise.testing.flows import FLOWS, SIZE, Flow
from tests.dataflow.machines import FOUR, Shuffle

TILE_BYTES = 4 * SIZE * SIZE

every_flow = pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)


def results(flow: Flow, places: list[str], **options: Any) -> list[Tensor]:
    with Machine(places, **options) as machine:
        return [data.get() for data in flow.run(machine, places, 1.0)]


def arrivals(machine: Machine) -> dict[int, int]:
    arrived: dict[int, int] = {}
    for (_, target), size in machine.mover.moved_bytes.items():
        arrived[target] = arrived.get(target, 0) + size
    return arrived


@every_flow
def test_a_flow_moves_the_bytes_counted_by_hand_and_no_more(flow: Flow) -> None:
    with Machine(FOUR) as machine:
        flow.run(machine, FOUR, 1.0)
        assert arrivals(machine) == flow.arriving_bytes


@every_flow
def test_on_one_place_only_the_inputs_move(flow: Flow) -> None:
    with Machine(["cpu:0"]) as machine:
        flow.run(machine, ["cpu:0"], 1.0)
        assert set(machine.mover.moved_bytes) == {(machine.host.index, 0)}


@every_flow
def test_a_flow_gives_the_same_bits_on_one_place_and_on_four_in_any_order(flow: Flow) -> None:
    expected = results(flow, ["cpu:0"])
    shuffled: list[dict[str, Any]] = [{"make_stream": Shuffle(seed).make()} for seed in range(5)]
    for options in [{}, {"chunk_bytes": 1000}, *shuffled]:
        for found, value in zip(results(flow, FOUR, **options), expected, strict=True):
            assert torch.equal(found, value)


@every_flow
@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0, 2.0])
def test_overlap_reaches_nine_tenths_of_the_best_possible_makespan(flow: Flow, ratio: float) -> None:
    with Machine(FOUR, links=Link(bytes_per_second=TILE_BYTES / ratio)) as machine:
        flow.run(machine, FOUR, 1.0)
        report = machine.report()
    assert 0.97 <= report.efficiency <= 1.0 + 1e-9


def test_a_chain_takes_its_tasks_and_its_copies_one_after_another() -> None:
    with Machine(FOUR, links=Link(bytes_per_second=2 * TILE_BYTES)) as machine:
        FLOWS[0].run(machine, FOUR, 1.0)
        report = machine.report()
    assert report.makespan_seconds == pytest.approx(8 * 1.0 + 8 * 0.5)
    assert report.overlap == 0.0
    assert [event.name for event in report.critical_path][-3:] == ["scale6", "y6", "scale7"]


def test_a_pipeline_hides_its_copies_behind_its_tasks() -> None:
    """Copies of the first input and weight, three hops, and then the last stage never waits: (m + p - 1) tasks."""
    with Machine(FOUR, links=Link(bytes_per_second=10 * TILE_BYTES)) as machine:
        FLOWS[5].run(machine, FOUR, 1.0)
        report = machine.report()
    assert report.makespan_seconds == pytest.approx(2 * 0.1 + 3 * 0.1 + 8 + 3)
    assert report.overlap > 0.85


def replayed(flow: Flow, places: list[str], num_replays: int, **options: Any) -> list[Tensor]:
    kept: list[Data] = []
    with Machine(places, **options) as machine:
        program = machine.record(lambda: kept.extend(flow.run(machine, places, 1.0)))
        for _ in range(num_replays):
            program.replay()
        assert program.kind == "list"
        return [data.get() for data in kept]


@every_flow
def test_a_flow_that_is_recorded_and_replayed_gives_the_same_bits_again(flow: Flow) -> None:
    """The stencil goes on from where it was; the others give what they gave."""
    for num_replays in (0, 1, 2):
        expected = replayed(flow, ["cpu:0"], num_replays)
        for options in ({}, {"make_stream": Shuffle(num_replays).make()}):
            for found, value in zip(replayed(flow, FOUR, num_replays, **options), expected, strict=True):
                assert torch.equal(found, value)


@every_flow
def test_a_flow_passes_its_check(flow: Flow) -> None:
    with Machine(FOUR) as machine:
        checked = machine.check(lambda: flow.run(machine, FOUR, 1.0))
    assert checked.num_tasks > 0
    assert checked.num_values > 0
