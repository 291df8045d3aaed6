"""What the real runtime measures: the parts of a step add up to it on every rank, under every kind of plan."""

import pytest

from shardwise.explain.doctor.examine import examine
from shardwise.ranks.spawn import Ranks
from shardwise.trace.attribution import critical_path
from shardwise.trace.events import Lane, Trace
from shardwise.trace.hidden import hidden_of_ranks
from shardwise.trace.memory import peak_by_owner
from shardwise.trace.run import Run
from shardwise.trace.stretches import Part, parts_of_ranks
from tests.stages.small import small_matrices
from tests.trace.steps import traced_step

TWO = (
    "pp=2,microbatches=4",
    "pp=2,schedule=zb-v,microbatches=4",
    "pp=2,schedule=zb-h1,microbatches=4,recompute=full",
    "dp=2,microbatches=2",
    "dp=2,zero=3",
    "tp=2",
    "cp=2",
)
FOUR = ("dp=2,pp=2,microbatches=2,zero=1", "tp=2,pp=2,microbatches=2", "pp=4,schedule=gpipe,microbatches=4")


#: Plans of which the others have every part: another order of computation, two axes of which each is alone above.
LEFT_OUT = ("pp=2,schedule=zb-v,microbatches=4", "tp=2,pp=2,microbatches=2", "pp=4,schedule=gpipe,microbatches=4")
every_plan = pytest.mark.parametrize(
    "plan", [pytest.param(each, marks=pytest.mark.whole if each in LEFT_OUT else ()) for each in (*TWO, *FOUR)]
)


class Traces(dict[str, Trace]):
    """By plan, each traced when a test first asks for it."""

    def __init__(self, two: Ranks, four: Ranks) -> None:
        self._two, self._four = two, four

    def __missing__(self, plan: str) -> Trace:
        ranks = self._two if plan in TWO else self._four
        trace: Trace = ranks.run(traced_step, plan)[0]
        return self.setdefault(plan, trace)


@pytest.fixture(scope="module")
def traces(two: Ranks, four: Ranks) -> Traces:
    return Traces(two, four)


@every_plan
def test_the_parts_add_up_to_the_step_on_every_rank(plan: str, traces: dict[str, Trace]) -> None:
    trace = traces[plan]
    assert trace.num_ranks == (2 if plan in TWO else 4)
    assert len(trace.windows) == trace.num_ranks
    for rank, parts in enumerate(parts_of_ranks(trace)):
        assert sum(parts.values()) == pytest.approx(trace.makespan, rel=0.01)
        assert all(seconds >= 0 for seconds in parts.values())
        assert 0 < parts[Part.COMPUTE] < trace.makespan
        assert parts[Part.COMPUTE] <= trace.busy[rank] + 1e-9
        assert parts[Part.OPTIMIZER] > 0


@every_plan
def test_every_event_lies_in_the_step_of_its_rank(plan: str, traces: dict[str, Trace]) -> None:
    trace = traces[plan]
    assert trace.start == 0
    for event in trace.events:
        begin, end = trace.windows[event.rank]
        assert begin - 1e-9 <= event.start <= event.end <= end + 1e-9


def test_who_let_what_start_is_known_across_ranks(traces: dict[str, Trace]) -> None:
    trace = traces["pp=2,microbatches=4"]
    receives = [event for event in trace.events if event.lane is Lane.RECEIVE]
    assert len(receives) == 8
    for receive in receives:
        assert receive.after is not None
        send = trace.events[receive.after]
        assert (send.lane, send.rank, send.peer) == (Lane.SEND, receive.peer, receive.rank)
        assert send.start <= receive.end
    assert {event.rank for event in critical_path(trace)} == {0, 1}


def test_recomputation_and_collectives_inside_of_layers_are_told_apart(traces: dict[str, Trace]) -> None:
    again = parts_of_ranks(traces["pp=2,schedule=zb-h1,microbatches=4,recompute=full"])
    plain = parts_of_ranks(traces["pp=2,microbatches=4"])
    assert all(parts[Part.RECOMPUTATION] > 0 for parts in again)
    assert all(parts[Part.RECOMPUTATION] == 0 for parts in plain)
    waits = {event.name for event in traces["tp=2"].events if event.lane is Lane.WAIT}
    assert "all_reduce of ranks 0 1" in waits


def test_sums_over_replicas_are_seen_where_they_run_beside_the_computation(traces: dict[str, Trace]) -> None:
    trace = traces["dp=2,pp=2,microbatches=2,zero=1"]
    sums = [event for event in trace.events if event.lane is Lane.COLLECTIVE]
    assert {event.name for event in sums} == {"a sum of gradients"}
    assert {event.rank for event in sums} == {0, 1, 2, 3}
    assert {each.kind for each in trace.traffic if each.peer is None} >= {"reduce_scatter", "all_gather"}
    assert all(0 <= hidden < trace.makespan for hidden in hidden_of_ranks(trace))


def test_replicas_are_ranks_of_their_own(traces: dict[str, Trace]) -> None:
    trace = traces["dp=2,pp=2,microbatches=2,zero=1"]
    stages = [{event.stage for event in events} for events in trace.compute]
    assert stages == [{0}, {0}, {1}, {1}]
    peers = {event.rank: event.peer for event in trace.events if event.lane is Lane.SEND}
    assert peers == {0: 2, 1: 3, 2: 0, 3: 1}


def test_bytes_are_known_by_owner_and_by_link(traces: dict[str, Trace]) -> None:
    trace = traces["pp=2,microbatches=4"]
    first, second = peak_by_owner(trace)
    assert set(first) == {"parameters", "gradients", "optimizer", "activations"}
    assert all(held > 0 for held in first.values())
    # AdamW keeps two numbers for each weight, and a count.
    assert first["optimizer"] == pytest.approx(2 * first["gradients"], rel=0.02)
    # With 1F1B the first of two ranks holds two microbatches, the last one.
    assert first["activations"] > 0
    assert second["activations"] > 0
    sent = {(each.rank, each.peer): each for each in trace.traffic}
    # Four microbatches of 2 rows of 16 tokens of 32 numbers of 4 bytes, each way.
    assert sent[0, 1].num_messages == sent[1, 0].num_messages == 4
    assert sent[0, 1].num_bytes == sent[1, 0].num_bytes == 4 * 2 * 16 * 32 * 4
    sharded = peak_by_owner(traces["dp=2,zero=3"])
    assert sharded[0]["optimizer"] < 0.6 * (first["optimizer"] + second["optimizer"])


def test_a_rank_that_sleeps_is_found_and_so_is_a_slow_loader(two: Ranks) -> None:
    trace = two.run(traced_step, "pp=2,microbatches=4", {1: 0.05}, 0.2)[0]
    found = {finding.kind: finding for finding in examine(Run(name="r", trace=trace))}
    assert found["slow stage"].ranks == (1,)
    assert found["data wait"].gain_seconds == pytest.approx(0.2)


def test_alone_a_rank_has_a_step_of_its_own() -> None:
    with small_matrices():
        trace = traced_step("dp=1", data_wait=0.01)
    (parts,) = parts_of_ranks(trace)
    assert sum(parts.values()) == pytest.approx(trace.makespan)
    assert parts[Part.DATA] == pytest.approx(0.01)
