import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from shardwise.trace.events import Event, Holding, Lane, Trace
from shardwise.trace.memory import held_over_time
from shardwise.trace.perfetto import to_perfetto
from tests.trace.played import GENERATORS, event, played, trace_of

every_schedule = pytest.mark.parametrize("name", sorted(GENERATORS))


def entries(trace: Trace, phase: str) -> list[dict[str, Any]]:
    """The entries of one phase, as a reader of the file gets them."""
    document = json.loads(json.dumps(to_perfetto(trace), allow_nan=False))
    return [entry for entry in document["traceEvents"] if entry["ph"] == phase]


@every_schedule
def test_every_event_is_a_slice_of_its_rank(name: str) -> None:
    trace = played(name, 4, 8, hop=0.125)
    slices = entries(trace, "X")
    assert Counter((entry["pid"], entry["name"]) for entry in slices) == Counter(
        (event.rank, event.name) for event in trace.events
    )
    for entry in slices:
        assert {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"} == set(entry)
        assert entry["dur"] >= 0


def test_a_second_is_a_million_microseconds_and_the_instruction_stands_beside() -> None:
    (entry,) = entries(trace_of(Event("2F7", 0, Lane.COMPUTE, 0.5, 2.0, stage=2, microbatch=7)), "X")
    assert (entry["ts"], entry["dur"]) == (500_000, 1_500_000)
    assert entry["args"] == {"instruction": "2F7", "stage": 2, "microbatch": 7}


def test_a_transfer_says_who_is_at_its_other_end() -> None:
    slices = {entry["name"]: entry for entry in entries(played("1f1b", 2, 2, hop=0.5), "X")}
    assert slices["0SEND_F0>1"]["args"]["peer"] == 1
    assert slices["1RECV_F0<0"]["args"]["peer"] == 0


def test_a_receive_is_shown_while_its_bytes_move() -> None:
    slices = {entry["name"]: entry for entry in entries(played("1f1b", 2, 2, hop=0.5), "X")}
    receive = slices["1RECV_F0<0"]
    assert (receive["ts"], receive["dur"]) == (1_000_000, 500_000)
    assert receive["args"]["posted_us"] == 0


def test_ranks_and_lanes_have_names() -> None:
    names = entries(played("1f1b", 2, 2), "M")
    assert [(entry["pid"], entry["args"]["name"]) for entry in names if entry["name"] == "process_name"] == [
        (0, "rank 0"),
        (1, "rank 1"),
    ]
    lanes = {(entry["pid"], entry["args"]["name"]) for entry in names if entry["name"] == "thread_name"}
    assert lanes == {(rank, lane) for rank in (0, 1) for lane in ("compute", "send", "receive")}


@every_schedule
def test_slices_of_one_thread_never_overlap(name: str) -> None:
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for entry in entries(played(name, 4, 8, hop=3.5), "X"):
        threads.setdefault((entry["pid"], entry["tid"]), []).append((entry["ts"], entry["ts"] + entry["dur"]))
    for slices in threads.values():
        assert all(earlier[1] <= later[0] for earlier, later in pairwise(sorted(slices)))


def test_a_lane_whose_events_overlap_has_several_threads() -> None:
    trace = trace_of(
        event("0SEND_F0>1", 0, 0, 3, lane=Lane.SEND),
        event("0SEND_F1>1", 0, 1, 4, lane=Lane.SEND),
        event("0SEND_F2>1", 0, 3, 6, lane=Lane.SEND),
    )
    first, second, third = entries(trace, "X")
    assert first["tid"] == third["tid"] != second["tid"]
    names = [entry["args"]["name"] for entry in entries(trace, "M") if entry["name"] == "thread_name"]
    assert names == ["send", "send 2"]


@every_schedule
def test_a_flow_leads_from_each_send_to_its_receive(name: str) -> None:
    trace = played(name, 4, 8, hop=0.125)
    slices = {(entry["pid"], entry["tid"], entry["ts"]): entry["name"] for entry in entries(trace, "X")}
    starts = {entry["id"]: slices[entry["pid"], entry["tid"], entry["ts"]] for entry in entries(trace, "s")}
    ends = {entry["id"]: slices[entry["pid"], entry["tid"], entry["ts"]] for entry in entries(trace, "f")}
    assert len(starts) == sum(event.lane is Lane.SEND for event in trace.events)
    assert starts.keys() == ends.keys()
    for number, sent in starts.items():
        source, _, target = sent.replace("SEND", "RECV").partition(">")
        stage, middle, microbatch = source.partition("RECV")
        assert ends[number] == f"{target}{middle}{microbatch}<{stage}"
    assert all(entry["bp"] == "e" for entry in entries(trace, "f"))


def test_what_is_held_is_a_counter_of_its_rank() -> None:
    trace = played("1f1b", 3, 6)
    for rank in range(3):
        counted = [(entry["ts"], entry["args"]["held"]) for entry in entries(trace, "C") if entry["pid"] == rank]
        assert counted == [(time * 1e6, held) for time, held in held_over_time(trace)[rank]]


def test_the_trace_keeps_its_name() -> None:
    assert to_perfetto(played("1f1b", 2, 2))["otherData"] == {"name": "1f1b"}


def test_an_empty_trace_has_only_the_names_of_its_ranks() -> None:
    empty = Trace(name="empty", num_ranks=2, events=())
    assert entries(empty, "X") == []
    assert len(entries(empty, "M")) == 4


def test_bytes_are_counted_by_owner_where_they_were_measured() -> None:
    trace = replace(
        trace_of(event("0F0", 0, 0, 1)),
        holdings=(Holding(0, "activations", 0.0, 64.0), Holding(0, "activations", 1.0, -64.0)),
    )
    counters = [(entry["name"], entry["ts"], entry["args"]) for entry in entries(trace, "C")]
    assert counters == [("activations", 0, {"bytes": 64}), ("activations", 1e6, {"bytes": 0})]
