"""From a plan and a split module to the complete schedule that runs it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.schedule.auto.search import auto
from shardwise.schedule.catalogue import make_schedule
from shardwise.schedule.generators.pipedream_2bw import pipedream_2bw
from shardwise.schedule.instruction import Kind
from shardwise.schedule.passes.lower import lower
from shardwise.schedule.passes.offload import insert_offloads
from shardwise.schedule.placement import Placement
from shardwise.schedule.prices import StageTimes, stage_prices
from shardwise.schedule.question import Question
from shardwise.schedule.schedule import Schedule
from shardwise.schedule.simulate import simulate
from shardwise.schedule.verify import verify
from shardwise.stages.stage import Split

# A list has an end. Emptying the pipe costs the time of its length, here once in so many steps.
_STEPS_BETWEEN_FLUSHES = 32
_WORTH_CHUNKS = 0.01


def schedule_of(plan: Plan, costs: Callable[[int], Sequence[float]] | None = None) -> Schedule:
    """Return the plan's schedule, computation only.

    For `auto`, `costs` gives what each stage costs if there are so many; without it they are alike. Memory is no limit.
    """
    if plan.schedule == "pipedream-2bw":
        return pipedream_2bw(plan.pp, plan.microbatches, _STEPS_BETWEEN_FLUSHES)
    if plan.schedule != "auto":
        return make_schedule(plan.schedule, plan.pp, plan.microbatches, plan.chunks)
    if plan.layers is not None or plan.chunks is not None:
        # Times for each stage, where their number is given, leave `auto` no other number.
        num_stages = len(plan.layers) if plan.layers else plan.pp * (plan.chunks or 1)
        return _find(plan, num_stages, costs)[0]
    # Two chunks send twice as much: they must be worth it.
    schedule, seconds = _find(plan, plan.pp, costs)
    try:
        chunked, with_chunks = _find(plan, 2 * plan.pp, costs)
    except ShardwiseError:  # There is too little to divide.
        return schedule
    return chunked if with_chunks < (1 - _WORTH_CHUNKS) * seconds else schedule


def _find(plan: Plan, num_stages: int, costs: Callable[[int], Sequence[float]] | None) -> tuple[Schedule, float]:
    """The best schedule for so many stages, and how long it takes: 3 for each microbatch, if all were even."""
    each = costs(num_stages) if costs is not None else [1.0] * num_stages
    shares = [cost * plan.pp / sum(each) for cost in each]
    times = tuple(StageTimes(forward=share, input_gradient=share, weight_gradient=share) for share in shares)
    schedule = auto(
        Question(
            num_ranks=plan.pp,
            num_microbatches=plan.microbatches,
            times=times,
            memory=(float(plan.microbatches),) * plan.pp,
            num_chunks=num_stages // plan.pp,
        )
    )
    return schedule, simulate(lower(schedule), stage_prices(schedule.placement, times)).makespan


def step_seconds(schedule: Schedule, costs: Sequence[float]) -> float:
    """How long a step takes if stages cost this much a microbatch: a third for each of F, I and W.

    The first stage has no gradient to give back: what it would be is little, and the rest of its backward is one.
    """
    parts = [StageTimes(forward=cost / 3, input_gradient=cost / 3, weight_gradient=cost / 3) for cost in costs]
    parts[0] = StageTimes(forward=costs[0] / 3, input_gradient=0.0, weight_gradient=2 * costs[0] / 3)
    times = [parts[stage % len(costs)] for stage in range(schedule.placement.num_stages)]
    return simulate(lower(schedule), stage_prices(schedule.placement, times)).makespan


def complete(
    schedule: Schedule,
    split: Split,
    *,
    reduce_gradients: bool = False,
    max_gathered: int | None = None,
    offloads_activations: bool = False,
) -> Schedule:
    """Return the schedule with what the module needs: its skips and ties, transfers and steps; proven.

    With `reduce_gradients`, and with `max_gathered` stages at a time, it has what replicas need too. With
    `offloads_activations`, what every forward saves leaves the device and comes back for its backward.
    """
    connected = replace(schedule, placement=_with_flow(schedule.placement, split))
    if offloads_activations:
        connected = insert_offloads(connected)
    finished = lower(connected, reduce_gradients=reduce_gradients, max_gathered=max_gathered)
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
