"""Runs for the tests of the page."""

from pathlib import Path

from shardwise.explain.report.page import make_page
from shardwise.schedule.catalogue import make_schedule
from shardwise.schedule.passes.lower import lower
from shardwise.schedule.prices import StageTimes, stage_prices
from shardwise.schedule.simulate import simulate
from shardwise.trace.events import Event, Lane, Trace
from shardwise.trace.run import Choice, Run


def a_run(schedule: str, num_ranks: int, num_microbatches: int, *, hop: float = 0.1, name: str | None = None) -> Run:
    """A simulated run whose stages take 1 for each of F, I and W."""
    made = lower(make_schedule(schedule, num_ranks, num_microbatches))
    trace = simulate(made, stage_prices(made.placement, [StageTimes()] * num_ranks, hops=[hop]))
    plan = (
        Choice(key="pp", value=str(num_ranks), reason="the model does not fit on fewer"),
        Choice(key="schedule", value=schedule, reason="the smallest bubble in this memory"),
    )
    return Run(name=name or schedule, trace=trace, plan=plan, unit="F")


def a_large_run(num_ranks: int, num_microbatches: int) -> Run:
    """A pipeline of forwards and backwards without gaps, put together by hand: a simulation would take its time."""
    events = []
    for rank in range(num_ranks):
        for microbatch in range(num_microbatches):
            start = rank + 3.0 * microbatch
            events.append(Event(f"{rank}F{microbatch}", rank, Lane.COMPUTE, start, start + 1, rank, microbatch, 1.0))
            back = start + 2 * (num_ranks - rank)
            events.append(
                Event(f"{rank}B{microbatch}", rank, Lane.COMPUTE, back + 1, back + 3, rank, microbatch, 0, -1.0)
            )
    window = (0.0, max(event.end for event in events))
    trace = Trace(name="1f1b", num_ranks=num_ranks, events=tuple(events), windows=(window,) * num_ranks)
    return Run(name="large", trace=trace)


def write_page(folder: Path, run: Run, other: Run | None = None) -> Path:
    path = folder / "page.html"
    path.write_text(make_page(run, other), encoding="utf-8")
    return path
