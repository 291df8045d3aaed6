"""A run from what was typed: a folder, a trace, or a plan, whose schedule is then simulated."""

from pathlib import Path

from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.schedule.catalogue import make_schedule
from shardwise.schedule.passes.lower import lower
from shardwise.schedule.prices import StageTimes, stage_prices
from shardwise.schedule.simulate import simulate
from shardwise.trace.run import Choice, Run, load_run


def find_run(text: str) -> Run:
    """The run that somebody means."""
    if "=" in text and not Path(text).exists():
        return simulated(Plan.parse(text))
    return load_run(Path(text))


def simulated(plan: Plan) -> Run:
    """The step of a plan's pipeline, every stage taking 1 for a forward and for each half of a backward."""
    if plan.schedule == "auto":
        raise ShardwiseError(
            f"the schedule of {plan} is found for the times of a real run", remedy=f"{plan}".replace("auto", "zb-v")
        )
    schedule = lower(make_schedule(plan.schedule, plan.pp, plan.microbatches, plan.chunks))
    trace = simulate(schedule, stage_prices(schedule.placement, [StageTimes()] * plan.pp))
    choices = (part.split("=", 1) for part in str(plan).split(","))
    return Run(name=str(plan), trace=trace, plan=tuple(Choice(key=key, value=value) for key, value in choices), unit="")
