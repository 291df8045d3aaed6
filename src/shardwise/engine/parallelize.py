"""`parallelize`: an unmodified module, a plan, a loss and an optimizer, to something that trains.

The same script runs alone, where one process runs every rank; under `torchrun`; or through `spawn`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from shardwise.engine.device_check import check_example
from shardwise.engine.local_engine import Engine
from shardwise.engine.mesh_engine import MeshEngine
from shardwise.engine.options import Options
from shardwise.engine.preflight import (
    check_alone,
    check_arguments,
    check_bucket_bytes,
    check_compiles,
    check_module,
    has_halves,
)
from shardwise.engine.prepare import prepare
from shardwise.engine.process_engine import ProcessEngine
from shardwise.planner.composition import check_composition
from shardwise.planner.plan import Plan
from shardwise.ranks.mesh import agree_on
from shardwise.ranks.torchrun import join_if_launched
from shardwise.sharding.context.mask import Mask
from shardwise.sharding.context.sequence_shards import Entry
from shardwise.stages.stage import Batch, Loss
from shardwise.states.parameter_group import MakeOptimizer, Share


def parallelize(
    module: nn.Module,
    plan: Plan | str,
    *,
    loss: Loss,
    optimizer: MakeOptimizer | Sequence[Share],
    example: Batch,
    clip: float | None = None,
    compile: bool | str = False,
    seed: int = 0,
    pad: bool = False,
    through_blocks: bool = False,
    measure: bool = False,
    tensor: Mapping[str, str] | None = None,
    tensor_chunks: int | None = None,
    positions: str | None = "position_ids",
    entries: Mapping[str, Entry | int | None] | None = None,
    masks: Mask | None = None,
    bucket_bytes: int | None = None,
) -> Engine | ProcessEngine | MeshEngine:
    """Return an engine that trains `module` under `plan`.

    `plan` may be a `Plan` or its short form, `pp=3,schedule=zb-v,microbatches=8`. `loss(output, batch)` gives the mean
    over a microbatch, or its sum and the number that it is summed over: then all of a batch weigh the same, however
    they are spread. It is tried on the example first. The module is put in training mode; one on the meta device gets
    the weights of this process's stages, from `seed` alone. `optimizer` makes one for all parameters, or several are
    given, each for its share of them.

    Gradients are clipped to a global norm of `clip`, if given. With `compile` each unit is compiled, by `inductor` or
    by the backend that it names. With `pad` the microbatches need not divide a batch: some have a row more, or, in a
    batch of too few rows, repeat one that counts for nothing. With `through_blocks` a pipeline may be cut in a block
    where whole blocks do not divide evenly; with `measure` it is cut by what units take here, which are timed first,
    and not by their FLOPs and bytes.

    What is not found is said: `tensor` names layers and how each is cut over tp, and `tensor_chunks` in how many chunks
    such a layer sends what it computes, if not as many as pay (`docs/tensor.md`); `positions`, `entries` and `masks`
    say how cp is to take the module and its batches (`docs/context.md`). Gradients are summed over replicas in buckets
    of `bucket_bytes`, if given (`docs/data_parallel.md`).

    Where `torch.distributed` has several ranks, each of them runs one of the plan. Under `torchrun` it is started here.
    """
    check_arguments(module, plan, loss, optimizer, example)
    chosen = Plan.parse(plan) if isinstance(plan, str) else plan
    join_if_launched()
    are_many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if are_many:
        agree_on(chosen)
    check_composition(chosen)
    check_module(module)
    check_example(module, example)
    check_bucket_bytes(bucket_bytes)
    options = Options(
        clip=clip,
        compile=compile,
        seed=seed,
        pad=pad,
        through_blocks=through_blocks,
        measure=measure,
        tensor=tensor,
        tensor_chunks=tensor_chunks,
        positions=positions,
        entries=entries,
        masks=masks,
        bucket_bytes=bucket_bytes,
    )
    given: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "example": example, "options": options}
    return _one_of_many(module, chosen, **given) if are_many else _alone(module, chosen, **given)


def _one_of_many(
    module: nn.Module,
    plan: Plan,
    *,
    loss: Loss,
    optimizer: MakeOptimizer | Sequence[Share],
    example: Batch,
    options: Options,
) -> ProcessEngine | MeshEngine:
    """The engine of this process, which runs one rank."""
    plan.check_world(dist.get_world_size())
    # Weights of 16 bits have copies in full precision, which only a mesh keeps.
    has_masters = plan.precision != "fp32" and has_halves(module) and plan.schedule != "pipedream-2bw"
    is_mesh = plan.num_ranks > plan.pp or has_masters
    if is_mesh and options.compile:
        check_compiles(plan)
    many = MeshEngine if is_mesh else ProcessEngine
    return many(module, plan, loss=loss, optimizer=optimizer, example=example, options=options)


def _alone(
    module: nn.Module,
    plan: Plan,
    *,
    loss: Loss,
    optimizer: MakeOptimizer | Sequence[Share],
    example: Batch,
    options: Options,
) -> Engine:
    """The engine of one process, which runs every rank."""
    check_alone(plan)
    stages, schedule, callers = prepare(module, plan, loss=loss, example=example, options=options)
    return Engine(
        module,
        plan,
        stages,
        schedule,
        loss=loss,
        optimizer=optimizer,
        clip=options.clip,
        pad=options.pad,
        seed=None if options.compile else options.seed,
        callers=callers,
    )
