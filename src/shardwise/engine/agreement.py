"""Agreements between ranks before a module is cut: the costs of its units, and whether any rank refuses the cut."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar, cast

import torch

from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.stages.no_collectives import CollectiveMetError, NoCollectives
from shardwise.stages.split.module_stage import ModuleStage
from shardwise.stages.split.python_draws import draws_digest, python_draws, set_python_draws
from shardwise.stages.split.unit_flow import UnitCall
from shardwise.stages.stage import Split

_T = TypeVar("_T")

#: Maps this rank's value to the list of all ranks' values.
Gather = Callable[[Any], list[Any]]


def agree_on_costs(gather: Gather, calls: Sequence[UnitCall]) -> None:
    """Replace the costs of units by their mean over all ranks. All ranks call this alike.

    Costs decide where to cut, and ranks of a mesh measure different ones: one may have more heads or experts than
    another, or its experts more tokens.
    """
    costs = [[each.flops, each.bytes, each.weight_bytes, each.seconds or 0.0] for each in calls]
    told = gather(([each.name for each in calls], costs))
    first, _ = told[0]
    for rank, (names, _) in enumerate(told):
        if names != first:
            place = next((at for at, pair in enumerate(zip(first, names, strict=False)) if pair[0] != pair[1]), -1)
            raise ShardwiseError(
                f"on the example rank 0 calls {len(first)} units and rank {rank} calls {len(names)}, at first different"
                f" at {first[place]}: which units run depends on the data",
                remedy="decide inside a unit what to compute",
            )
    means = torch.tensor([costs for _, costs in told], dtype=torch.float64).mean(0)
    for call, mean in zip(calls, means.tolist(), strict=True):
        call.flops, call.bytes, call.weight_bytes, seconds = mean
        call.seconds = None if call.seconds is None else seconds


def _agree_on_cut(gather: Gather, split: Split) -> None:
    """Refuse stages that ranks have cut in different places: a layer would be on none of them, or on two."""
    told = gather(split.units)
    for rank, units in enumerate(told):
        if units != told[0]:
            one, other = (" | ".join(", ".join(stage) for stage in each) for each in (told[0], units))
            raise ShardwiseError(
                f"ranks cut the module in different places, rank 0 into {one} and rank {rank} into {other}: what it"
                " leaves behind outside of its units is not the same on both",
                remedy="layers= in the plan says where to cut; or nothing kept outside of units (caches, files)",
            )


def tried_by_first(gather: Gather, rank: int, device: torch.device, attempt: Callable[[Any], _T]) -> _T:
    """Return the result of a trial by the first rank: all have the same module. If ranks communicate in it, all try.
    All ranks call this alike.

    `attempt` is called with a context for its first runs: in it, if one rank tries for all, no collective may start.
    Random number generators are restored afterwards, because the other ranks have not drawn.
    """
    mine: tuple[bool, Any] | None = None
    if rank == 0:
        draws = python_draws()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            try:
                mine = True, attempt(NoCollectives)
            except CollectiveMetError:
                mine = None
            except ShardwiseError as error:
                mine = False, (error.problem, error.remedy)
        set_python_draws(draws)
    told = gather(mine)[0]
    if told is None:
        return attempt(nullcontext)
    is_found, found = told
    if not is_found:
        raise ShardwiseError(found[0], remedy=found[1])
    return cast(_T, found)


def agree_on_refusal(gather: Gather, error: ShardwiseError | None, draws: bool) -> None:
    """Let all ranks raise the error against the cut of any of them. All call this alike.

    `draws`: forwards draw from Python's generators outside of units, and these must be at one place on all ranks.
    """
    told = gather((None if error is None else (error.problem, error.remedy), draws, draws_digest()))
    found = next((each for each, _, _ in told if each is not None), None)
    if found is not None:
        raise ShardwiseError(found[0], remedy=found[1])
    if any(each for _, each, _ in told) and len({where for _, _, where in told}) > 1:
        raise ShardwiseError(
            "the forward draws from Python's or NumPy's generators outside of units, and ranks would draw others",
            remedy="random.seed(0) and numpy.random.seed(0) on every rank before sw.parallelize; or draw in a unit",
        )


def kept_in_order(split: Split, plan: Plan, rank: int | None, gather: Gather) -> Split:
    """Return the stages, on which all ranks have agreed. If ranks must call the same units, these are called as on the
    example. All call this alike; a process that runs all ranks (None) agrees with itself."""
    if rank is not None and len(split.units) > 1:
        _agree_on_cut(gather, split)
    for each in split.stages:
        if isinstance(each, ModuleStage) and each.in_order is None:
            each.in_order = why_in_order(plan)
    return split


def why_in_order(plan: Plan) -> str | None:
    """Return why the units of one stage must be called as on the example; None if they need not."""
    if plan.zero == 3:
        return "under zero=3 replicas gather the weights of one unit after the other, all in one order"
    axes = [f"{axis}={getattr(plan, axis)}" for axis in ("tp", "cp", "ep") if getattr(plan, axis) > 1]
    return f"under {', '.join(axes)} several ranks compute each of them together" if axes else None
