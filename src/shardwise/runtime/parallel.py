"""`parallelize`: an unmodified module, a plan, a loss and an optimizer, to something that trains.

The same script runs alone, where one process runs every rank; under `torchrun`; or through `spawn`.
"""

import torch.distributed as dist
from torch import nn

from shardwise import environment
from shardwise.errors import ShardwiseError
from shardwise.planner.composition import check_composition
from shardwise.planner.plan import Plan
from shardwise.runtime.able import check_alone, check_module
from shardwise.runtime.engine import Engine
from shardwise.runtime.interpreter import Loss
from shardwise.runtime.mesh_engine import MeshEngine
from shardwise.runtime.prepare import prepare
from shardwise.runtime.process_engine import ProcessEngine
from shardwise.runtime.rank import choose_backend
from shardwise.runtime.stage import Batch
from shardwise.runtime.trainer import MakeOptimizer


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
) -> Engine | ProcessEngine | MeshEngine:
    """Return an engine that trains `module` under `plan`.

    `plan` may be a `Plan` or its short form, `pp=3,schedule=zb-v,microbatches=8`. `loss(output, batch)` gives the mean
    over a microbatch, or its sum and the number that it is summed over: then all of a batch weigh the same, however
    they are spread. It is tried on the example first. The module is put in training mode; one on the meta device gets
    the weights of this process's stages, from `seed` alone.

    Gradients are clipped to a global norm of `clip`, if given. With `compile` each unit is compiled, by `inductor` or
    by the backend that it names. With `pad` the microbatches need not divide a batch: some have a row more, or, in a
    batch of too few rows, repeat one that counts for nothing.

    Where `torch.distributed` has several ranks, each of them runs one of the plan. Under `torchrun` it is started here.
    """
    chosen = Plan.parse(plan) if isinstance(plan, str) else plan
    check_composition(chosen)
    check_module(module)
    _join_if_launched()
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        chosen.check_world(dist.get_world_size())
        if chosen.num_ranks > chosen.pp:
            if compile:
                raise ShardwiseError(
                    f"compile with plan {chosen}: blocks are compiled in pipelines (pp) alone yet",
                    remedy="compile=False",
                )
            return MeshEngine(
                module, chosen, loss=loss, optimizer=optimizer, example=example, clip=clip, seed=seed, pad=pad
            )
        return ProcessEngine(
            module,
            chosen,
            loss=loss,
            optimizer=optimizer,
            example=example,
            clip=clip,
            compile=compile,
            seed=seed,
            pad=pad,
        )
    check_alone(chosen)
    stages, schedule = prepare(module, chosen, loss=loss, example=example, pad=pad, seed=seed, compile=compile)
    return Engine(module, chosen, stages, schedule, loss=loss, optimizer=optimizer, clip=clip, pad=pad)


def _join_if_launched() -> None:
    """Under `torchrun`, start `torch.distributed` if the script has not."""
    place = environment.place_under_torchrun()
    if place is not None and dist.is_available() and not dist.is_initialized():
        dist.init_process_group(choose_backend(*place))
