"""Assemble an engine for a plan: cut the module, move its state to where it lives, make the executors."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from shardwise.engine.engine import Engine
from shardwise.engine.example_check import check_example
from shardwise.engine.make_execution import make_execution
from shardwise.engine.make_states import make_states, sharing_of
from shardwise.engine.options import Options
from shardwise.engine.parts import Parts
from shardwise.engine.prepare import prepare
from shardwise.engine.sharded import Sharded
from shardwise.engine.trial import Trial
from shardwise.execution.pipeline import complete
from shardwise.fusion.fuse import Fused, settle_kernels
from shardwise.planner.plan import Plan
from shardwise.ranks.wires import ManyProcesses, OneProcess
from shardwise.stages.stage import Batch, Loss
from shardwise.states.make_optimizers import MadeOptimizer, Optimizers, make_optimizers

# The number of stages gathered at a time, if the weights of a stage are gathered together.
_MAX_GATHERED = 2


def assemble(
    module: nn.Module,
    plan: Plan,
    *,
    loss: Loss,
    optimizer: Optimizers,
    example: Batch,
    options: Options,
    wires: OneProcess | ManyProcesses,
    owns_wires: bool,
) -> Engine:
    """Assemble an engine. Every process of the plan calls this alike."""
    Sharded.undo(module)  # An engine that was not closed may have left layers in 8 bits.
    fused = settle_kernels(module, loss, example, kernels=options.kernels)
    try:
        parts, optimizers = _parts(module, plan, loss, optimizer, example, options, wires, fused)
        return from_parts(parts, optimizers, owns_wires=owns_wires)
    except BaseException:
        fused.undo()
        raise


def _parts(
    module: nn.Module,
    plan: Plan,
    loss: Loss,
    optimizer: Optimizers,
    example: Batch,
    options: Options,
    wires: OneProcess | ManyProcesses,
    fused: Fused,
) -> tuple[Parts, Sequence[MadeOptimizer]]:
    optimizers = make_optimizers(optimizer, dict(module.named_parameters()))
    order = tuple(name for name, _ in module.named_parameters())
    shapes = {name: each.shape for name, each in module.state_dict().items() if isinstance(each, Tensor)}
    if not any(each.training for each in module.modules()):
        # Dropout acts in training mode only. In a module with mixed modes, the user chose the mode of each part.
        module.train()
    (microbatch, *others), device, rule, found, loss, weighed, by_first, settings = check_example(
        module, plan, loss, example, options, wires
    )
    sharded = Sharded(module, plan, wires.mesh, microbatch, options, loss, by_first)
    if sharded.tensor is not None:
        # A layer that could not be sharded along the sequence is whole on every rank.
        plan = replace(plan, sp=sharded.tensor.is_along_sequence)
    sharded.attach_fp8(module, device, options)
    place = None if isinstance(wires, OneProcess) else wires.ranks[0]
    without_numbers = {name for name, each in module.named_parameters() if each.is_meta}
    trial = Trial(module, loss, microbatch)
    with sharded.explained(module, microbatch):
        split, computed, callers, calls_before = prepare(
            module, plan, microbatch, asked=trial.asked, second=trial.second(plan, others), rank=place, options=options,
            gather=wires.gather, is_tried=wires.rank == 0 or not found.is_quiet or max(plan.tp, plan.ep, plan.cp) > 1,
        )  # fmt: skip
    trial.check(plan, shapes, split, wires)
    trial.guard(weighed, plan, split, sharded)
    if settings is not None:
        settings.stages, settings.evaluations.split = split.units, split.of_evaluation
        settings.evaluations.find_fault = None if sharded.tensor is None else sharded.tensor.find_fault
        settings.make_context = sharded.make_tried_context(options)
    if sharded.experts is not None and without_numbers:
        sharded.experts.draw(module, without_numbers, seed=options.seed, device=device)
    context = sharded.attach_context(module, options)
    if context is not None:
        context.attach_stages(split)
        if settings is not None:
            settings.context = context
    parts = Parts(
        module=module, plan=plan, split=split, schedule=computed,
        loss=weighed, options=options, sharded=sharded, order=order, shapes=shapes,
        wires=wires, device=device, callers=callers, calls_before=calls_before, written=trial.written,
        rule=rule, kind=found.tried.kind,
        has_metrics=trial.has_metrics, is_without_numbers=bool(without_numbers), fused=fused,
        settings=settings, compared=found.compared,
    )  # fmt: skip
    return parts, optimizers


def from_parts(parts: Parts, optimizers: Sequence[MadeOptimizer], *, owns_wires: bool) -> Engine:
    """Assemble an engine from stages that have been cut and a compute-only schedule."""
    sharing = sharing_of(parts)
    completed = partial(
        complete,
        parts.schedule,
        reduce_gradients=not sharing.local,
        max_gathered=_MAX_GATHERED if sharing.zero == 3 and not sharing.layerwise else None,
        offloads_activations=parts.plan.offload.activations > 0,
    )
    parts = replace(parts, schedule=completed(split=parts.split))
    states = make_states(parts, optimizers, sharing)
    evaluation = parts.schedule if parts.split.evaluated is None else completed(split=parts.split.of_evaluation)
    engine = Engine(parts, make_execution(parts, states, evaluation), states, owns_wires=owns_wires)
    if owns_wires:
        parts.wires.belong_to(engine)
    with engine.shown.open():
        engine.execution.batches.first.begin()
    return engine
