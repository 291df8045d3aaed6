"""A module made ready for a plan: cut into stages, its loss tried, given the weights that this process needs."""

from torch import nn

from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.runtime.batch import cut_batch, home_of
from shardwise.runtime.compiled import check_backend, compile_units
from shardwise.runtime.interpreter import Loss
from shardwise.runtime.losses import trial_of
from shardwise.runtime.manner import Manner
from shardwise.runtime.pipeline import schedule_of
from shardwise.runtime.split import split, stage_costs
from shardwise.runtime.split.choose import TooFewUnitsError
from shardwise.runtime.stage import Batch, Split
from shardwise.schedule.schedule import Schedule


def prepare(
    module: nn.Module,
    plan: Plan,
    *,
    loss: Loss,
    example: Batch,
    rank: int | None = None,
    pad: bool = False,
    seed: int = 0,
    compile: bool | str = False,
    through_blocks: bool = False,
) -> tuple[Split, Schedule]:
    """Return the stages of this process, which runs one rank or (None) all, and the schedule, computation only."""
    microbatch = cut_batch(example, plan.microbatches, pad=pad)[0]
    home = home_of(microbatch)
    backend = check_backend(compile, home)
    schedule = schedule_of(
        plan,
        lambda count: stage_costs(module.train(), count, microbatch, cut=plan.layers, through_blocks=through_blocks),
    )
    count = len(schedule.placement.pipes[0])
    try:
        with Manner.of(plan).precision(home):
            stages = split(
                module.train(),
                count,
                microbatch,
                only=None if rank is None else {stage % count for stage in schedule.placement.stages[rank]},
                cut=plan.layers,
                seed=seed,
                probe=trial_of(loss, microbatch),
                through_blocks=through_blocks,
            )
    except TooFewUnitsError as error:
        ranks = error.num_units * plan.pp // count
        raise ShardwiseError(
            error.problem, remedy=f"pp={ranks}" if ranks else f"pp={error.num_units},schedule=1f1b"
        ) from None
    if backend is not None:
        compile_units(stages, backend)
    return stages, schedule
