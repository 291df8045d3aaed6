"""An engine put together for a plan: the module cut, its states moved to where they live, executors made."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import nn

from shardwise.engine.batches import rows_of
from shardwise.engine.engine import Engine
from shardwise.engine.make_execution import make_execution, make_stream
from shardwise.engine.make_states import Original, make_states
from shardwise.engine.prepare import Options, prepare
from shardwise.engine.sharded import Sharded
from shardwise.execution.pipeline import complete
from shardwise.planner.plan import Plan
from shardwise.ranks.wires import ManyProcesses, OneProcess
from shardwise.schedule.instruction import Kind
from shardwise.schedule.schedule import Schedule
from shardwise.stages.batch import cut_batch, home_of
from shardwise.stages.losses import summed_only
from shardwise.stages.stage import Batch, Loss, Split
from shardwise.states.buckets.make import ZeroConfig
from shardwise.states.parameter_group import MakeOptimizer, Share

# Stages whose weights are gathered at a time, where a stage's come at once.
_MAX_GATHERED = 2


def assemble(
    module: nn.Module,
    plan: Plan,
    *,
    loss: Loss,
    optimizer: MakeOptimizer | Sequence[Share],
    example: Batch,
    options: Options,
    wires: OneProcess | ManyProcesses,
    owns_wires: bool,
) -> Engine:
    """Put an engine together. Every process of the plan calls this alike."""
    original = Original.of(module)
    loss = summed_only(loss, plan.cp) if plan.cp > 1 else loss
    rows = rows_of(example, plan, wires.mesh)
    # What is dropped in training is seen in training mode only.
    microbatch = cut_batch(rows, plan.microbatches, pad=options.pad)[0]
    sharded = Sharded(module.train(), plan, wires.mesh, microbatch, options)
    place = None if isinstance(wires, OneProcess) else wires.ranks[0]
    split, computed, callers = prepare(module, plan, loss=loss, example=rows, rank=place, options=options)
    context = sharded.attach_context(module, options)
    if context is not None:
        context.attach_stages(split)
    return from_split(
        module, plan, split, computed, loss=loss, optimizer=optimizer, device=home_of(rows), options=options,
        callers=callers, sharded=sharded, original=original, wires=wires, owns_wires=owns_wires,
    )  # fmt: skip


def from_split(
    module: nn.Module,
    plan: Plan,
    split: Split,
    computed: Schedule,
    *,
    loss: Loss,
    optimizer: MakeOptimizer | Sequence[Share],
    device: torch.device,
    options: Options,
    callers: Collection[str],
    sharded: Sharded,
    original: Original,
    wires: OneProcess | ManyProcesses,
    owns_wires: bool,
) -> Engine:
    """Put an engine together for stages that have been cut, and a schedule of computation only."""
    sharing = _sharing_of(plan, computed, options, has_halves=any(each.itemsize < 4 for each in module.parameters()))
    schedule = complete(
        computed,
        split,
        reduce_gradients=not sharing.local,
        max_gathered=_MAX_GATHERED if plan.zero == 3 and not sharing.layerwise else None,
        offloads_activations=plan.offload.activations > 0,
    )
    states = make_states(
        module, plan, split, schedule, optimizer=optimizer, sharing=sharing, sharded=sharded, original=original,
        wires=wires, clip=options.clip, device=device,
    )  # fmt: skip
    execution = make_execution(
        module, plan, split, schedule, loss=loss, options=options, callers=callers, states=states, sharded=sharded,
        wires=wires, device=device,
    )  # fmt: skip
    states.make_stream = lambda: make_stream(module, schedule, execution, states)
    states.begin_stream()
    return Engine(
        module, plan, split, schedule, execution=execution, states=states, sharded=sharded, wires=wires,
        owns_wires=owns_wires,
    )  # fmt: skip


def _sharing_of(plan: Plan, schedule: Schedule, options: Options, *, has_halves: bool) -> ZeroConfig:
    """How the state of the model lies on its replicas."""
    is_alone, is_stale = plan.num_ranks == plan.pp, schedule.staleness > 0
    updates_early = plan.offload.optimizer > 0 or plan.offload.parameters > 0
    sharing = ZeroConfig(
        zero=plan.zero,
        # With two versions of the weights, the one that a batch used is stepped on in place.
        masters=plan.precision != "fp32" and not is_stale,
        layerwise=not _splits_backward(schedule),
        offloaded=plan.offload.parameters,
        updates_late=updates_early,
        # What is updated in the backward, with its state from the host, is known bucket by bucket; so are the masters
        # of 16-bit weights, whose gradients are rounded as those of any other plan are.
        local=is_alone and plan.zero == 0 and (is_stale or not (updates_early or has_halves)),
    )
    return sharing if options.bucket_bytes is None else replace(sharing, bucket_bytes=options.bucket_bytes)


def _splits_backward(schedule: Schedule) -> bool:
    return any(part.kind is Kind.W for order in schedule.orders for each in order for part in each.parts)
