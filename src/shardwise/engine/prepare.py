"""A module made ready for a plan: cut into stages, its loss tried, given the weights that this process needs."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from shardwise.errors import ShardwiseError
from shardwise.execution.compute_policy import ComputePolicy
from shardwise.execution.pipeline import schedule_of, step_seconds
from shardwise.planner.plan import Plan
from shardwise.schedule.schedule import Schedule
from shardwise.sharding.context.mask import Mask
from shardwise.sharding.context.sequence_shards import Entry
from shardwise.sharding.dropout import Finding
from shardwise.stages.batch import cut_batch, home_of
from shardwise.stages.compiled import check_backend, compile_units
from shardwise.stages.cut_sync import agree_on_costs
from shardwise.stages.losses import trial_of
from shardwise.stages.split import split, stage_costs
from shardwise.stages.split.choose import TooFewUnitsError
from shardwise.stages.split.stopwatch import Stopwatch
from shardwise.stages.stage import Batch, Loss, Split

#: Schedules of more instructions than this are not played again and again to place a cut.
_MOST_INSTRUCTIONS = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All that `parallelize` takes by name, and says what it means."""

    clip: float | None = None
    compile: bool | str = False
    seed: int = 0
    pad: bool = False
    through_blocks: bool = False
    measure: bool = False
    tensor: Mapping[str, str] | None = None
    tensor_chunks: int | None = None
    positions: str | None = "position_ids"
    entries: Mapping[str, Entry | int | None] | None = None
    masks: Mask | None = None
    bucket_bytes: int | None = None


class Prepared(NamedTuple):
    """The stages of this process, and the schedule, computation only."""

    stages: Split
    schedule: Schedule
    #: The modules, by name, that drop at random by calling a function.
    callers: tuple[str, ...]


def prepare(
    module: nn.Module, plan: Plan, *, loss: Loss, example: Batch, rank: int | None = None, options: Options
) -> Prepared:
    """Make a module ready for this process, which runs one rank of a pipeline or (None) all.

    If it is one of many, all of them call this alike.
    """
    microbatch = cut_batch(example, plan.microbatches, pad=options.pad)[0]
    home = home_of(microbatch)
    backend = check_backend(options.compile, home)
    how: dict[str, Any] = {
        "cut": plan.layers,
        "through_blocks": options.through_blocks,
        "agree": None if rank is None else agree_on_costs,
        "stopwatch": Stopwatch() if options.measure else None,
    }
    schedule = schedule_of(plan, lambda count: stage_costs(module.train(), count, microbatch, **how))
    count = len(schedule.placement.pipes[0])
    finding = Finding()
    try:
        with ComputePolicy.of(plan).precision(home), finding.watching():
            stages = split(
                module.train(),
                count,
                microbatch,
                only=None if rank is None else {stage % count for stage in schedule.placement.stages[rank]},
                seed=options.seed,
                probe=trial_of(loss, microbatch),
                judge=partial(step_seconds, schedule) if _is_soon_judged(schedule) else max,
                **how,
            )
    except TooFewUnitsError as error:
        ranks = error.num_units * plan.pp // count
        raise ShardwiseError(
            error.problem, remedy=f"pp={ranks}" if ranks else f"pp={error.num_units},schedule=1f1b"
        ) from None
    except ShardwiseError as error:
        raise _in_keys(error) from None
    if backend is not None:
        compile_units(stages, backend)
    return Prepared(stages, schedule, tuple(finding.names(module)))


def _in_keys(error: ShardwiseError) -> ShardwiseError:
    """The splitter speaks of a cut in counts; in a plan they are layers."""
    found = re.fullmatch(r"cut=\[([\d, ]+)\](.*)", error.remedy or "")
    if found is None:
        return error
    return ShardwiseError(error.problem, remedy=f"layers={'+'.join(found[1].split(', '))}{found[2]}")


def _is_soon_judged(schedule: Schedule) -> bool:
    return sum(len(each) for each in schedule.orders) <= _MOST_INSTRUCTIONS
