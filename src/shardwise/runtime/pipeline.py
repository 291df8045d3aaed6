"""From a plan and a split module to the complete schedule that runs it."""

from dataclasses import replace

from shardwise.planner.plan import Plan
from shardwise.runtime.stage import Split
from shardwise.schedule.auto.search import Setting, auto
from shardwise.schedule.catalogue import make_schedule
from shardwise.schedule.generators.pipedream_2bw import pipedream_2bw
from shardwise.schedule.instruction import Kind
from shardwise.schedule.passes.lower import lower
from shardwise.schedule.placement import Placement
from shardwise.schedule.prices import StageTimes
from shardwise.schedule.schedule import Schedule
from shardwise.schedule.verify import verify

# A list has an end. Emptying the pipe costs the time of its length, here once in so many steps.
_STEPS_BETWEEN_FLUSHES = 32


def schedule_of(plan: Plan) -> Schedule:
    """Return the plan's schedule, computation only. `auto` is asked for even stages without a memory limit."""
    if plan.schedule == "pipedream-2bw":
        return pipedream_2bw(plan.pp, plan.microbatches, _STEPS_BETWEEN_FLUSHES)
    if plan.schedule != "auto":
        return make_schedule(plan.schedule, plan.pp, plan.microbatches, plan.chunks)
    # Times for each stage, where their number is given, leave `auto` no other number.
    num_stages = len(plan.layers) if plan.layers else plan.pp * (plan.chunks or 1)
    is_given = plan.layers is not None or plan.chunks is not None
    return auto(
        Setting(
            num_ranks=plan.pp,
            num_microbatches=plan.microbatches,
            times=(StageTimes(),) * num_stages,
            memory=(float(plan.microbatches),) * plan.pp,
            max_chunks=num_stages // plan.pp if is_given else 2,
        )
    )


def complete(schedule: Schedule, split: Split) -> Schedule:
    """Return the schedule with what the module needs: its skips and ties, transfers and steps; proven."""
    placement = _with_flow(schedule.placement, split)
    connected = Schedule.of(
        schedule.name,
        placement,
        schedule.num_microbatches,
        schedule.orders,
        num_steps=schedule.num_steps,
        staleness=schedule.staleness,
    )
    finished = lower(connected)
    verify(finished)
    return finished


def _with_flow(placement: Placement, split: Split) -> Placement:
    """Add values that jump over stages, and parameters that several stages hold, in each copy of the model."""
    count = split.num_stages
    skips = [
        (pipe[maker], pipe[reader]) for pipe in placement.pipes for maker, reader in split.edges if reader != maker + 1
    ]
    groups = dict.fromkeys(
        tuple(sorted(stage + copy * count for stage in stages for copy in range(len(placement.pipes))))
        for stages in split.ties.values()
    )
    return placement.with_skips(*skips).with_ties(*groups)


def forward_only(schedule: Schedule) -> Schedule:
    """Return the forwards of a complete schedule and their transfers: what evaluation runs."""
    kept = (Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.GATHER, Kind.RELEASE)
    once = replace(schedule, num_steps=1, staleness=0)
    return once.with_orders(
        [
            [
                each._replace(beside=None)
                for each in order
                if each.kind in kept and each.microbatch < schedule.num_microbatches
            ]
            for order in schedule.orders
        ]
    )
