"""Schedules by name, played against times that are those of one rank's whole stage."""

from collections.abc import Sequence

from shardwise.schedule.catalogue import make_schedule
from shardwise.schedule.instruction import parse
from shardwise.schedule.placement import Placement
from shardwise.schedule.prices import Prices, StageTimes, stage_prices
from shardwise.schedule.schedule import Schedule
from shardwise.schedule.simulate import simulate
from shardwise.trace.events import Event, Trace

#: Forward, input gradient, weight gradient.
Times = tuple[float, float, float]

UNIT: Times = (1, 1, 1)


def stage_times(times: Times, pair: float | None = None) -> StageTimes:
    forward, input_gradient, weight_gradient = times
    return StageTimes(forward=forward, input_gradient=input_gradient, weight_gradient=weight_gradient, pair=pair)


def even_prices(
    placement: Placement,
    times: Times = UNIT,
    *,
    hop: float = 0.0,
    pair: float | None = None,
    kept: float = 1.0,
    slowdown: float = 0.0,
) -> Prices:
    """Prices of ranks that are all alike; `kept` is the part of an activation that is held between I and W."""
    each = [stage_times(times, pair)] * placement.num_ranks
    return stage_prices(placement, each, hops=[hop], kept_for_weights=kept, slowdown=slowdown)


def played_schedule(
    schedule: Schedule, times: Times = UNIT, *, hop: float = 0.0, pair: float | None = None, kept: float = 1.0
) -> Trace:
    return simulate(schedule, even_prices(schedule.placement, times, hop=hop, pair=pair, kept=kept))


def played(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    times: Times = UNIT,
    *,
    chunks: int | None = None,
    hop: float = 0.0,
    pair: float | None = None,
    kept: float = 1.0,
) -> Trace:
    schedule = make_schedule(name, num_ranks, num_microbatches, chunks)
    return played_schedule(schedule, times, hop=hop, pair=pair, kept=kept)


def written(
    placement: Placement, *orders: str, num_microbatches: int = 1, num_steps: int = 1, staleness: int = 0
) -> Schedule:
    """A schedule from one line of text for each rank."""
    parsed = [[parse(word) for word in order.split()] for order in orders]
    return Schedule.of("by hand", placement, num_microbatches, parsed, num_steps=num_steps, staleness=staleness)


def texts(schedule: Schedule) -> list[str]:
    """One line of text for each rank."""
    return [" ".join(str(instruction) for instruction in order) for order in schedule.orders]


def event_of(trace: Trace, name: str) -> Event:
    """The one event with a name."""
    found = [event for event in trace.events if event.name == name]
    assert len(found) == 1, f"{name} stands {len(found)} times in the trace"
    return found[0]


def times_of(trace: Trace, names: Sequence[str]) -> list[tuple[float, float]]:
    """Start and end of each named event."""
    return [(event.start, event.end) for event in (event_of(trace, name) for name in names)]
