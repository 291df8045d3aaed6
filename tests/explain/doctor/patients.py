"""Runs to examine, healthy or with a fault seeded in them: simulated steps, and the same as if they were measured."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from shardwise.schedule.catalogue import make_schedule
from shardwise.schedule.instruction import Instruction, Kind
from shardwise.schedule.passes.lower import lower
from shardwise.schedule.prices import Prices, StageTimes, stage_prices
from shardwise.schedule.simulate import simulate
from shardwise.trace.events import Event, Holding, Lane, Trace, Traffic
from shardwise.trace.run import Choice, Run

GIB = float(2**30)


def played(
    schedule: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    slower: Mapping[int, float] | None = None,
    late: Mapping[str, float] | None = None,
    hop: float = 0.0,
    jitter: float = 0.0,
) -> Trace:
    """A simulated step: some stages `slower` by a factor, some instructions `late` by a time, all a little unlike."""
    made = lower(make_schedule(schedule, num_ranks, num_microbatches))
    plain = stage_prices(made.placement, [StageTimes()] * num_ranks, hops=[hop])
    rng = random.Random(1)

    def seconds(instruction: Instruction, rank: int) -> float:
        factor = (slower or {}).get(instruction.stage, 1.0) * (1 + jitter * rng.uniform(-1, 1))
        return plain.seconds(instruction, rank) * factor + (late or {}).get(str(instruction), 0.0)

    prices = Prices(seconds=seconds, hop_seconds=plain.hop_seconds, held=plain.held)
    return simulate(made, prices)


def as_measured(trace: Trace) -> Trace:
    """The same step as ranks would have noted it: a receive is there only while it is waited for."""
    kept: list[Event] = []
    new_place: dict[int, int] = {}
    ends = [0.0] * trace.num_ranks
    order = sorted(range(len(trace.events)), key=lambda index: (trace.events[index].end, trace.events[index].start))
    for index in order:
        event = trace.events[index]
        if event.lane in (Lane.RECEIVE, Lane.COLLECTIVE) or (event.lane is Lane.STEP and event.end == event.start):
            continue
        new_place[index] = len(kept)
        # A send takes its rank no time: what is under way is seen by who waits for it.
        kept.append(event._replace(after=None, end=event.start if event.lane is Lane.SEND else event.end))
    for rank, events in enumerate(trace.compute):
        for event in events:
            receive = None if event.after is None else trace.events[event.after]
            if receive is not None and receive.lane is Lane.SEND and event.start > ends[rank]:
                kept.append(
                    Event(
                        f"wait for {receive.name}", rank, Lane.RECEIVE, ends[rank], event.start, event.stage,
                        event.microbatch, after=new_place[event.after or 0], peer=receive.rank,
                    )
                )  # fmt: skip
            ends[rank] = event.end
    window = (trace.start, trace.start + trace.makespan)
    return replace(trace, events=tuple(kept), windows=(window,) * trace.num_ranks)


def replicated(traces: Sequence[Trace]) -> Trace:
    """Pipelines side by side: rank r of pipeline i is rank r * number + i, as in a mesh."""
    many = len(traces)
    events: list[Event] = []
    for place, trace in enumerate(traces):
        first = len(events)
        for event in trace.events:
            peer = None if event.peer is None else event.peer * many + place
            after = None if event.after is None else event.after + first
            events.append(event._replace(rank=event.rank * many + place, peer=peer, after=after))
    end = max(trace.start + trace.makespan for trace in traces)
    num_ranks = many * traces[0].num_ranks
    return Trace(name=traces[0].name, num_ranks=num_ranks, events=tuple(events), windows=((0.0, end),) * num_ranks)


def with_end(trace: Trace, *pieces: tuple[str, Lane, float]) -> Trace:
    """A measured step that goes on, on every rank, with a step of the optimizer in which there are some pieces."""
    end = trace.start + trace.makespan
    length = sum(seconds for _, _, seconds in pieces)
    events = list(trace.events)
    for rank in range(trace.num_ranks):
        events.append(Event(f"{rank}STEP0", rank, Lane.STEP, end, end + length, rank, 0))
        reached = end
        for number, (name, lane, seconds) in enumerate(pieces):
            if lane is not Lane.STEP:
                events.append(Event(name, rank, lane, reached, reached + seconds, -1, number))
            reached += seconds
    return replace(trace, events=tuple(events), windows=((trace.start, end + length),) * trace.num_ranks)


def with_waits_inside(trace: Trace, name: str, share: float) -> Trace:
    """A measured step in which a part of every computation is a wait for others."""
    events = list(trace.events)
    numbers = [0] * trace.num_ranks
    for event in trace.events:
        if event.lane is Lane.COMPUTE:
            end = event.start + share * event.seconds
            events.append(Event(name, event.rank, Lane.WAIT, event.start, end, -1, numbers[event.rank]))
            numbers[event.rank] += 1
    return replace(trace, events=tuple(events))


def with_recomputation(trace: Trace, share: float) -> Trace:
    events = list(trace.events)
    events += [
        event._replace(lane=Lane.RECOMPUTE, end=event.start + share * event.seconds, held_at_start=0.0, held_at_end=0.0)
        for event in trace.events
        if event.lane is Lane.COMPUTE and Kind.B in event.name
    ]
    return replace(trace, events=tuple(events))


def with_data_wait(trace: Trace, seconds: float) -> Trace:
    """A measured step before which every rank stands still for its batch."""
    start = trace.start - seconds
    events = [Event("batch", rank, Lane.DATA, start, trace.start, -1, 0) for rank in range(trace.num_ranks)]
    moved = [event._replace(after=None if event.after is None else event.after + len(events)) for event in trace.events]
    windows = tuple((start, end) for _, end in trace.windows)
    return replace(trace, events=(*events, *moved), windows=windows)


def stretched(trace: Trace, seconds: float) -> Trace:
    """A measured step with nothing noted between computations, for so long before each."""
    shift = [0.0] * trace.num_ranks
    events = []
    for event in sorted(trace.events, key=lambda each: each.start):
        if event.lane is Lane.COMPUTE:
            shift[event.rank] += seconds
            events.append(
                event._replace(start=event.start + shift[event.rank], end=event.end + shift[event.rank], after=None)
            )
    end = max(event.end for event in events)
    return replace(trace, events=tuple(events), windows=((trace.start, end),) * trace.num_ranks)


def with_bytes(trace: Trace, *ranks: Mapping[str, float]) -> Trace:
    """The bytes of each owner, of each rank (the last serves all that follow)."""
    holdings = [
        Holding(rank, owner, trace.start, num_bytes)
        for rank in range(trace.num_ranks)
        for owner, num_bytes in ranks[min(rank, len(ranks) - 1)].items()
    ]
    return replace(trace, holdings=tuple(holdings))


def with_traffic(trace: Trace, *traffic: Traffic) -> Trace:
    return replace(trace, traffic=traffic)


def a_run(
    trace: Trace,
    plan: str = "",
    *,
    predicted: Trace | None = None,
    memory_bytes: float | None = None,
    facts: Mapping[str, str] | None = None,
) -> Run:
    choices = tuple(Choice(key=key, value=value) for key, _, value in (each.partition("=") for each in plan.split(",")))
    return Run(
        name="run",
        trace=trace,
        plan=choices if plan else (),
        predicted=predicted,
        memory_bytes=memory_bytes,
        facts=facts or {},
    )


Make = Callable[[], Run]
