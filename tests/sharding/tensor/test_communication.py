"""What cut layers send, in chunks: the same numbers and the same bytes, under way while others are computed."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.parity.check import check
from shardwise.planner.plan import Plan
from shardwise.ranks.collectives import Group, Pending
from shardwise.ranks.spawn import Ranks
from shardwise.sharding.tensor import communication as communication
from shardwise.sharding.tensor.communication import (
    LEAST_CHUNK_BYTES,
    AllReduce,
    Chunk,
    NoCommunication,
    SequenceShards,
    count_chunks,
)
from tests.crowd import Crowds
from tests.sharding.tensor import lengths, programs


class Pair(Group):
    """The first of two ranks, of whom the other is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2


class Log(list[str]):
    """What was done, in order. Collectives give back numbers of the right shape."""

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(communication, "start_all_reduce", lambda rows, group: self._start(rows, group))
        monkeypatch.setattr(
            communication, "start_reduce_scatter", lambda rows, group, _: self._start(rows[:, ::2], group)
        )
        monkeypatch.setattr(
            communication, "start_all_gather", lambda rows, group, _: self._start(rows.repeat(1, 2, 1), group)
        )

    def _start(self, result: Tensor, group: Group) -> Pending:
        self.append("start")
        return Pending(None, lambda: self._finish(result), group)

    def _finish(self, result: Tensor) -> Tensor:
        self.append("wait")
        return result

    def multiply(self, chunk: Chunk, rows: Tensor) -> None:
        del chunk
        self.append(f"multiply {len(rows)}")
        rows.zero_()


@pytest.mark.parametrize(
    "way", [AllReduce((2, 8), Pair(), 2), SequenceShards((2, 8), 8, Pair(), 2), SequenceShards((16,), 16, Pair(), 2)]
)
def test_a_chunk_is_on_its_way_while_the_next_is_multiplied(
    way: NoCommunication, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log()
    log.watch(monkeypatch)
    finish = way.send(4, torch.zeros(()), log.multiply)
    assert log == ["multiply 8", "start", "multiply 8", "start"]
    assert finish().numel() == 4 * (16 if isinstance(way, AllReduce) else 8)


def test_the_next_chunk_arrives_while_one_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    log.watch(monkeypatch)
    for chunk, rows in SequenceShards((2, 8), 8, Pair(), 2).receive(torch.zeros(2, 4, 4)):
        log.multiply(chunk, rows)
    assert log == ["start", "start", "wait", "multiply 8", "wait", "multiply 8"]


@pytest.mark.parametrize(
    ("device", "num_bytes", "wanted", "count"),
    [
        ("cuda", LEAST_CHUNK_BYTES - 1, None, 1),
        ("cuda", 2 * LEAST_CHUNK_BYTES, None, 2),
        ("cuda", 100 * LEAST_CHUNK_BYTES, None, 4),
        ("cpu", 100 * LEAST_CHUNK_BYTES, None, 1),
        ("cpu", 1, 3, 3),
    ],
)
def test_small_messages_go_in_one_and_so_does_all_on_a_cpu(
    device: str, num_bytes: int, wanted: int | None, count: int
) -> None:
    assert count_chunks(num_bytes, torch.device(device), wanted) == count


def test_a_layer_of_fewer_rows_than_chunks_has_as_many_chunks_as_rows() -> None:
    log = Log()
    AllReduce((3,), Group(), 5).send(4, torch.zeros(()), log.multiply)
    assert log == ["multiply 1"] * 3


@pytest.mark.parametrize("sequence", [False, pytest.param(True, marks=pytest.mark.whole)])
def test_in_chunks_gradients_are_those_of_the_whole_module(two: Ranks, sequence: bool) -> None:
    """Of several sequences some, of one alone some tokens; odd numbers of either; and blocks without a dim for them."""
    shapes = [(7, 1), (12, 1), (1, 1), (5, 3)]
    # 2 and 3 chunks in turn: what has 2 with shared sequences has 3 without.
    cases: list[Any] = [
        (programs.net, (97, 24, 4, 2, 0.0, length, rows), {"sequence": sequence, "num_chunks": 2 + (at + sequence) % 2})
        for at, (length, rows) in enumerate(shapes)
    ]
    families = ("opt", "t5") if sequence else ("gpt2", "llama")
    cases += [(programs.family, (family, 7), {"sequence": sequence, "num_chunks": 2}) for family in families]
    for outcomes in two.run(programs.parities, cases):
        for outcome in outcomes:
            assert outcome.loss < 1e-5
            assert outcome.worst < 1e-5, outcome.where


@pytest.mark.parametrize("sequence", [False, True])
def test_chunks_change_neither_the_bytes_nor_what_a_rerun_gives(two: Ranks, sequence: bool) -> None:
    whole, sent = two.run(programs.in_chunks, sequence, None, None)[0]
    apart, sent_apart = two.run(programs.in_chunks, sequence, 3, None)[0]
    assert sent_apart == sent
    assert float((apart - whole).norm() / whole.norm()) < 1e-6


def test_chunks_are_of_the_type_that_autocast_computes_in(two: Ranks) -> None:
    whole, sent = two.run(programs.in_chunks, True, None, torch.bfloat16)[0]
    apart, sent_apart = two.run(programs.in_chunks, True, 3, torch.bfloat16)[0]
    assert sent_apart == sent
    assert float((apart - whole).norm() / whole.norm()) < 1e-2


@pytest.mark.parametrize(
    "text",
    [
        "tp=2,microbatches=2,recompute=full",
        pytest.param("tp=2,sp=true,pp=2,microbatches=4,schedule=zb-v", marks=pytest.mark.whole),
    ],
)
def test_an_engine_trains_in_chunks_as_one_device_does(text: str, crowds: Crowds) -> None:
    plan = Plan.parse(text)
    make = partial(lengths.dropping, plan, lengths.LENGTHS, family="gpt2", tensor_chunks=2)
    assert check(plan, make, ranks=crowds.of(plan.num_ranks)).comparison.first is None
