"""Schedules played for the tests of what is made of their traces, and traces written by hand."""

from collections.abc import Callable

from shardwise.schedule.generators.dualpipe_v import dualpipe_v
from shardwise.schedule.generators.gpipe import gpipe
from shardwise.schedule.generators.interleaved import interleaved
from shardwise.schedule.generators.one_f_one_b import one_f_one_b
from shardwise.schedule.generators.zb_h1 import zb_h1
from shardwise.schedule.generators.zb_v import zb_v
from shardwise.schedule.prices import StageTimes, stage_prices
from shardwise.schedule.schedule import Schedule
from shardwise.schedule.simulate import simulate
from shardwise.trace.events import Event, Lane, Trace

#: Those that take any number of ranks from 2, with twice as many microbatches.
GENERATORS: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
}


def played(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    times: tuple[float, float, float] = (1, 1, 1),
    hop: float = 0.0,
    slowdown: float = 0.0,
) -> Trace:
    """What the simulator makes of a schedule whose ranks are all alike."""
    return played_schedule(GENERATORS[name](num_ranks, num_microbatches), times=times, hop=hop, slowdown=slowdown)


def played_schedule(
    schedule: Schedule, *, times: tuple[float, float, float] = (1, 1, 1), hop: float = 0.0, slowdown: float = 0.0
) -> Trace:
    forward, input_gradient, weight_gradient = times
    stage = StageTimes(forward=forward, input_gradient=input_gradient, weight_gradient=weight_gradient)
    prices = stage_prices(schedule.placement, [stage] * schedule.num_ranks, hops=[hop], slowdown=slowdown)
    return simulate(schedule, prices)


def event(
    name: str, rank: int, start: float, end: float, *, lane: Lane = Lane.COMPUTE, after: int | None = None
) -> Event:
    """An event whose stage is its rank, for traces written by hand."""
    return Event(name, rank, lane, start, end, stage=rank, microbatch=0, after=after)


def trace_of(*events: Event) -> Trace:
    return Trace(name="by hand", num_ranks=max((event.rank for event in events), default=0) + 1, events=events)
