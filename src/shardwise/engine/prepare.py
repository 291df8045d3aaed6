"""Prepare a module for a plan: cut it into stages, try its loss, and give this process its weights."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from shardwise.engine.agreement import Gather, agree_on_costs, agree_on_refusal, kept_in_order, why_in_order
from shardwise.engine.options import Options
from shardwise.errors import ShardwiseError
from shardwise.execution.compute_policy import ComputePolicy
from shardwise.execution.pipeline import schedule_of, step_seconds
from shardwise.planner.plan import Plan
from shardwise.schedule.schedule import Schedule
from shardwise.sharding.dropout import Finding
from shardwise.stages.batch import home_of
from shardwise.stages.compiled import check_backend, compile_units
from shardwise.stages.recompute import recompute_units
from shardwise.stages.split.choose import TooFewUnitsError
from shardwise.stages.split.split import split, stage_costs
from shardwise.stages.split.stopwatch import Stopwatch
from shardwise.stages.stage import Batch, Second, Split

#: Schedules with more instructions than this are not simulated repeatedly to place a cut.
_MOST_INSTRUCTIONS = 4_000


class Prepared(NamedTuple):
    """The stages of this process, and the schedule, with computation only."""

    stages: Split
    schedule: Schedule
    #: The modules, by name, that apply dropout by calling a function.
    callers: tuple[str, ...]
    #: For each stage, how often the dropouts of its units were called in earlier stages; empty if they were not.
    calls_before: tuple[Mapping[str, int], ...]


def prepare(
    module: nn.Module,
    plan: Plan,
    batch: Batch,
    *,
    second: Second,
    asked: Mapping[str, Any],
    rank: int | None,
    options: Options,
    gather: Gather,
    is_tried: bool = True,
) -> Prepared:
    """Make a module ready for this process, which runs one rank of a pipeline or (None) all.

    `batch` is a microbatch, of which `split` is `asked` more; stages are tried on the `second`. If the process is one
    of many, all call this alike, and `gather` gives each what all of them give. Without `is_tried`
    another of them tries the stages.
    """
    home = home_of(batch)
    backend = check_backend(options.compile, home)
    how: dict[str, Any] = {
        "cut": plan.layers,
        "through_blocks": options.through_blocks,
        "agree": None if rank is None else partial(agree_on_costs, gather),
        "stopwatch": Stopwatch() if options.measure else None,
    }
    schedule = schedule_of(plan, lambda count: stage_costs(module, count, batch, **how))
    count = len(schedule.placement.pipes[0])
    finding = Finding()
    second = replace(
        second,
        # If a rank has stages of both copies of a model, these share all attributes too.
        processes=[] if rank is None or len(schedule.placement.pipes) > 1 else schedule.placement.ranks,
        agree=None if rank is None else partial(agree_on_refusal, gather),
        is_tried=is_tried,
    )
    try:
        with ComputePolicy.of(plan, casts=options.masters).precision(home), finding.watching():
            stages = split(
                module,
                count,
                batch,
                only=None if rank is None else {stage % count for stage in schedule.placement.stages[rank]},
                seed=options.seed,
                evaluates=why_in_order(plan) is not None or plan.offload.parameters > 0,
                second=second if options.verify else None,
                judge=partial(step_seconds, schedule) if schedule.num_instructions <= _MOST_INSTRUCTIONS else max,
                **asked,
                **how,
            )
    except TooFewUnitsError as error:
        ranks = error.num_units * plan.pp // count
        raise ShardwiseError(
            error.problem, remedy=f"pp={ranks}" if ranks else f"pp={error.num_units},schedule=1f1b"
        ) from None
    except ShardwiseError as error:
        raise in_keys(error) from None
    _recompute_and_compile(stages, plan, ComputePolicy.of(plan, schedule, casts=options.masters), backend)
    return Prepared(kept_in_order(stages, plan, rank, gather), schedule, *finding.callers(module, stages.units))


def _recompute_and_compile(stages: Split, plan: Plan, policy: ComputePolicy, backend: str | None) -> None:
    """Selective recomputation is compiled together with its block; full recomputation wraps the compiled block."""
    by_layer, is_compiled = policy.recompute == "layers", backend is not None
    how: dict[str, Any] = {
        "is_compiled": is_compiled,
        "selective": policy.selective,
        "num_layers": plan.recompute_layers,
        "stops_early": plan.tp * plan.cp * plan.ep == 1,
    }
    if by_layer and policy.selective and is_compiled:
        recompute_units(stages, **how)
    if backend is not None:
        compile_units(stages, backend)
    if by_layer and not (policy.selective and is_compiled):
        recompute_units(stages, **how)


def in_keys(error: ShardwiseError) -> ShardwiseError:
    """Reword an error about a cut: the splitter counts units, and a plan counts layers."""
    found = re.fullmatch(r"cut=\[([\d, ]+)\](.*)", error.remedy or "")
    if found is None:
        return error
    return ShardwiseError(error.problem, remedy=f"layers={'+'.join(found[1].split(', '))}{found[2]}")
