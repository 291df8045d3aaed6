"""Turn a plan and a split module into the complete schedule that the executors run."""

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

# A schedule is a finite list. Each flush of the pipeline costs one pipeline depth of time; do it once in so many steps.
_STEPS_BETWEEN_FLUSHES = 32
_WORTH_CHUNKS = 0.01


def schedule_of(plan: Plan, costs: Callable[[int], Sequence[float]] | None = None) -> Schedule:
    """Return the plan's schedule, computation only.

    For `auto`, `costs(n)` gives the relative cost of each of `n` stages; without it all stages cost the same. The
    search does not limit memory.
    """
    if plan.schedule == "pipedream-2bw":
        return pipedream_2bw(plan.pp, plan.microbatches, _STEPS_BETWEEN_FLUSHES)
    if plan.schedule != "auto":
        return make_schedule(plan.schedule, plan.pp, plan.microbatches, plan.chunks)
    if plan.layers is not None or plan.chunks is not None:
        # The plan fixes the number of stages, and per-stage times leave `auto` no other choice.
        num_stages = len(plan.layers) if plan.layers else plan.pp * (plan.chunks or 1)
        return _find(plan, num_stages, costs)[0]
    # Two chunks per rank double the transfers: take them only if the step gets shorter by more than `_WORTH_CHUNKS`.
    schedule, seconds = _find(plan, plan.pp, costs)
    try:
        chunked, with_chunks = _find(plan, 2 * plan.pp, costs)
    except ShardwiseError:  # The model has too few layers for twice the stages.
        return schedule
    return chunked if with_chunks < (1 - _WORTH_CHUNKS) * seconds else schedule


def _find(plan: Plan, num_stages: int, costs: Callable[[int], Sequence[float]] | None) -> tuple[Schedule, float]:
    """Return the best schedule for `num_stages` stages and its makespan; a microbatch takes 3 on an average rank."""
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
    """Return the time of a step, given the cost of each stage for one microbatch: a third each for F, I and W.

    The first stage has no input gradient to send: its I costs nothing, and its W takes both thirds of the backward.
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
    """Add skips, ties, transfers and optimizer steps to a schedule, verify it and return it.

    `reduce_gradients` adds the gradient reductions over replicas. `max_gathered` adds the gathers of sharded
    parameters, for at most that many stages at a time. With `offloads_activations`, the activations saved by every
    forward leave the device and are reloaded for its backward.
    """
    connected = replace(schedule, placement=_with_flow(schedule.placement, split))
    if offloads_activations:
        connected = insert_offloads(connected)
    finished = lower(connected, reduce_gradients=reduce_gradients, max_gathered=max_gathered)
    verify(finished)
    return finished


def _with_flow(placement: Placement, split: Split) -> Placement:
    """Add skip connections between stages, and parameters tied across stages, for each copy of the model."""
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
    """Return the schedule of an evaluation: the forwards of a complete schedule with their transfers and gathers."""
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
