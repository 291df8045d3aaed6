"""A run from a command-line argument: a folder, a trace, or a plan, whose schedule is then simulated."""

from itertools import product
from pathlib import Path

from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.schedule.catalogue import make_schedule
from shardwise.schedule.passes.lower import lower
from shardwise.schedule.prices import StageTimes, stage_prices
from shardwise.schedule.simulate import simulate
from shardwise.trace.run import Choice, Run, load_run


def find_run(text: str) -> Run:
    """Return the run of a name."""
    if "=" in text and not Path(text).exists():
        return simulated(Plan.parse(text))
    return load_run(Path(text))


def simulated(plan: Plan) -> Run:
    """Return the step of a plan's pipeline: a forward of an average stage takes 1 F, and so does half a backward.

    Ranks that differ in another axis than pp do the same, and are simulated once.
    """
    if plan.schedule == "auto":
        raise ShardwiseError(
            f"the schedule of {plan} is found for the times of a real run", remedy=f"{plan}".replace("auto", "zb-v")
        )
    schedule = lower(make_schedule(plan.schedule, plan.pp, plan.microbatches, plan.chunks))
    trace = simulate(schedule, stage_prices(schedule.placement, _stage_times(plan, schedule.placement.num_stages)))
    choices = (part.split("=", 1) for part in str(plan).split(","))
    return Run(
        name=str(plan),
        trace=trace,
        plan=tuple(Choice(key=key, value=value) for key, value in choices),
        unit="F",
        alike=ranks_alike(plan) if plan.num_ranks > plan.pp else (),
    )


def _stage_times(plan: Plan, num_stages: int) -> list[StageTimes]:
    """Return the shares of stages by their layers, if the plan names them; otherwise equal ones."""
    if plan.layers is None:
        return [StageTimes()] * plan.pp
    if len(plan.layers) != num_stages:
        raise ShardwiseError(
            f"layers={'+'.join(map(str, plan.layers))} are of {len(plan.layers)} stages, and {plan.schedule} with "
            f"pp={plan.pp} has {num_stages}",
            remedy="layers= with a number for each stage, or none",
        )
    one = plan.pp / sum(plan.layers)
    return [
        StageTimes(forward=one * count, input_gradient=one * count, weight_gradient=one * count)
        for count in plan.layers
    ]


def ranks_alike(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Return, for each rank of a pipeline, all ranks of the plan with the same work, by the order of the axes."""
    axes = plan.order.split("-")
    sizes = [getattr(plan, axis) for axis in axes]
    found: list[list[int]] = [[] for _ in range(plan.pp)]
    for rank, place in enumerate(product(*map(range, sizes))):
        found[place[axes.index("pp")]].append(rank)
    return tuple(map(tuple, found))
