"""`parallelize`: an unmodified module, a plan, a loss and an optimizer, to something that trains.

The same script runs alone, where one process runs every rank; under `torchrun`; or through `spawn`.
"""

from typing import Any

import torch.distributed as dist
from torch import nn

from shardwise.planner.composition import check_composition
from shardwise.planner.plan import Plan
from shardwise.runtime.able import check_alone, check_compiles, check_module
from shardwise.runtime.engine import Engine
from shardwise.runtime.interpreter import Loss
from shardwise.runtime.joining_in import join_if_launched
from shardwise.runtime.mesh import agree_on
from shardwise.runtime.mesh_engine import MeshEngine
from shardwise.runtime.prepare import prepare
from shardwise.runtime.process_engine import ProcessEngine
from shardwise.runtime.stage import Batch
from shardwise.runtime.trainer import MakeOptimizer
from shardwise.runtime.whereabouts import check_example


def parallelize(
    module: nn.Module,
    plan: Plan | str,
    *,
    loss: Loss,
    optimizer: MakeOptimizer,
    example: Batch,
    clip: float | None = None,
    compile: bool | str = False,
    seed: int = 0,
    pad: bool = False,
    through_blocks: bool = False,
) -> Engine | ProcessEngine | MeshEngine:
    """Return an engine that trains `module` under `plan`.

    `plan` may be a `Plan` or its short form, `pp=3,schedule=zb-v,microbatches=8`. `loss(output, batch)` gives the mean
    over a microbatch, or its sum and the number that it is summed over: then all of a batch weigh the same, however
    they are spread. It is tried on the example first. The module is put in training mode; one on the meta device gets
    the weights of this process's stages, from `seed` alone.

    Gradients are clipped to a global norm of `clip`, if given. With `compile` each unit is compiled, by `inductor` or
    by the backend that it names. With `pad` the microbatches need not divide a batch: some have a row more, or, in a
    batch of too few rows, repeat one that counts for nothing. With `through_blocks` a pipeline may be cut in a block
    where whole blocks do not divide evenly.

    Where `torch.distributed` has several ranks, each of them runs one of the plan. Under `torchrun` it is started here.
    """
    chosen = Plan.parse(plan) if isinstance(plan, str) else plan
    join_if_launched()
    are_many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if are_many:
        agree_on(chosen)
    check_composition(chosen)
    check_module(module)
    check_example(module, example)
    how: dict[str, Any] = {"compile": compile, "seed": seed, "pad": pad, "through_blocks": through_blocks}
    if are_many:
        chosen.check_world(dist.get_world_size())
        has_other_axes = chosen.num_ranks > chosen.pp
        if has_other_axes and compile:
            check_compiles(chosen)
        many = MeshEngine if has_other_axes else ProcessEngine
        return many(module, chosen, loss=loss, optimizer=optimizer, example=example, clip=clip, **how)
    check_alone(chosen)
    stages, schedule = prepare(module, chosen, loss=loss, example=example, **how)
    own_seed = None if compile else seed
    return Engine(module, chosen, stages, schedule, loss=loss, optimizer=optimizer, clip=clip, pad=pad, seed=own_seed)
