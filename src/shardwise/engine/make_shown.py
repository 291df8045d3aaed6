"""Choose the tensors of a module that are guarded between the steps of a plan."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial, wraps
from threading import get_ident
from types import MethodType
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.engine.asked_state import ask_of_state
from shardwise.engine.modes import in_evaluation_mode
from shardwise.engine.parts import Parts
from shardwise.engine.same_weights import OutsideWrites
from shardwise.engine.shown import Shown, View
from shardwise.engine.spent_gradients import GradientPlaces
from shardwise.engine.stage_groups import follow_groups
from shardwise.engine.unchanged import names_of_cut
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.ranks.wires import OneProcess
from shardwise.states.buckets.bucket import Bucket
from shardwise.states.data_parallel import DataParallel
from shardwise.states.optimizers.updates import Updates
from shardwise.torch_private import step_wrappers


def make_shown(
    parts: Parts, parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor], data: DataParallel,
    outside: OutsideWrites | None,
) -> Shown:  # fmt: skip
    """Return the guards of a module whose `parameters` and `buffers` this process holds. `outside` is told of
    accesses."""
    views = [*_views_of_parameters(parts, parameters, data), *_views_of_buffers(parts, buffers)]
    for tensor, view in views:
        if outside is not None and view.problem is None:
            outside.expect(tensor)
            view.on_look = WeakMethod(outside.note)
    shown = Shown(parts.module, [*views, *_views_of_pieces(parts, data)])
    shown.on_open = None if outside is None else outside.settle
    shown.places = GradientPlaces(parameters)
    # Where weights have no memory between steps, code of the user's that sets modes must not look at them.
    around = shown.interrupted if parts.plan.zero == 3 or parts.plan.offload.parameters else nullcontext
    shown.in_evaluation_mode = partial(in_evaluation_mode, parts.module, around)
    if parts.plan.pp == 1:  # With stages, gradients are tracked (`stage_groups.py`).
        without = {id(tensor) for tensor, view in views if not view.has_gradient}
        shown.with_gradients = [each for each in parameters.values() if each.requires_grad and id(each) not in without]
    for optimizer in data.updates.optimizers:
        _refuse_steps_by_hand(optimizer, shown)
        if parts.plan.pp > 1 and not isinstance(parts.wires, OneProcess):
            follow_groups(optimizer, shown, parts.plan.pp)
        cut = names_of_cut(parameters, optimizer, data.updates)
        host = data.updates.states
        if cut or host is not None:
            ask_of_state(optimizer, shown, cut, _has(data.updates), None if host is None else host.wait)
    return shown


def _has(updates: Updates) -> str:
    return updates.pieces or "a copy of it in full precision"


def _refuse_steps_by_hand(optimizer: Optimizer, shown: Shown) -> None:
    """Refuse a habitual `optimizer.step()` after `train_step`: it would be a second step, on this rank's part only."""
    inner, thread = optimizer.step, get_ident()

    @wraps(inner)
    def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if shown.is_idle and thread == get_ident():
            raise ShardwiseError(
                f"{type(optimizer).__name__}.step() was called between steps of the engine, and"
                " engine.train_step(batch) has taken this step already",
                remedy="engine.train_step(batch) alone: it zeroes gradients, runs forward and backward, and steps",
            )
        return inner(*args, **kwargs)

    function: Any = step
    step_wrappers.add(function.__code__)
    # A bound method: schedulers that are made later read its `__func__`.
    vars(optimizer)["step"] = MethodType(step, optimizer)


def _views_of_parameters(
    parts: Parts, held: Mapping[str, nn.Parameter], data: DataParallel
) -> Iterator[tuple[Tensor, View]]:
    plan, experts = parts.plan, parts.sharded.experts
    bucket_of = {id(each): bucket for bucket in data.buckets for each in bucket.weights.parameters}
    for name, parameter in parts.module.named_parameters():
        bucket = bucket_of.get(id(parameter))
        is_expert = experts is not None and name in experts.parameters
        problem = None
        if name not in held:
            problem = _elsewhere(plan)
        elif is_expert or parameter.shape != parts.shapes.get(name, parameter.shape):
            problem = _part(parameter.shape, parts.shapes[name], plan, is_expert=is_expert)
        elif bucket is not None:
            problem = _away(bucket, plan)
        if problem is not None:
            view = View(name, problem=problem, wait=None)
            # A parameter that was offloaded is on the host when the engine is closed.
            view.ends_with_engine = bucket is not None and bucket.is_offloaded and not bucket.weights.is_sharded
            yield parameter, view
        elif bucket is not None and (plan.zero or bucket.is_renewed_late or bucket.master is not None):
            lacks = f"zero={plan.zero} adds up a piece of it on each rank" if plan.zero else None
            view = View(name, problem=None, wait=bucket.weights.show, lacks_gradient=lacks)
            # Writes must be detected: the optimizer updates another copy of the weights.
            view.counts_writes = bucket.master is not None
            yield parameter, view


def _views_of_buffers(parts: Parts, held: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, View]]:
    for name, buffer in parts.module.named_buffers():
        if name not in held:
            yield buffer, View(name, problem=_elsewhere(parts.plan), wait=None)


def _views_of_pieces(parts: Parts, data: DataParallel) -> Iterator[tuple[Tensor, View]]:
    """Yield the tensors that optimizers hold in place of the module's parameters: code that iterates over groups would
    mistake them for parameters."""
    own, updates = {id(each) for each in parts.module.parameters()}, data.updates
    for each in updates.updated:
        if id(each.weight) not in own:
            yield (
                each.weight,
                View(each.name, problem=f"this optimizer has {_has(updates)}", wait=None, thread=get_ident()),
            )


def _elsewhere(plan: Plan) -> str:
    return f"it is on another stage of the pipeline (pp={plan.pp})"


def _part(here: torch.Size, whole: torch.Size, plan: Plan, *, is_expert: bool) -> str:
    axis = f"ep={plan.ep}" if is_expert and plan.ep > 1 else f"tp={plan.tp}"
    return f"it has a part of it, {list(here)} of {list(whole)} ({axis})"


def _away(bucket: Bucket, plan: Plan) -> str | None:
    if bucket.weights.is_sharded:
        return f"between steps each of {bucket.key.replicas.shard.size} ranks keeps a piece of it (zero={plan.zero})"
    if bucket.is_offloaded:
        return f"between steps it is in memory of the host (offload.parameters={plan.offload.parameters:g})"
    return None
