"""`parallelize`: an unmodified module, a plan, a loss and an optimizer, to something that trains.

The same script runs alone, where one process runs every rank; under `torchrun`; or through `spawn`.
"""

import torch.distributed as dist
from torch import nn

from shardwise.planner.plan import Plan
from shardwise.runtime.able import check_module, check_plan
from shardwise.runtime.engine import Engine, MakeOptimizer, make_engine
from shardwise.runtime.interpreter import Loss
from shardwise.runtime.process_engine import ProcessEngine
from shardwise.runtime.stage import Batch


def parallelize(
    module: nn.Module,
    plan: Plan | str,
    *,
    loss: Loss,
    optimizer: MakeOptimizer,
    example: Batch,
    clip: float | None = None,
) -> Engine | ProcessEngine:
    """Return an engine that trains `module` under `plan`.

    `plan` may be a `Plan` or its short form, `pp=3,schedule=zb-v,microbatches=8`. `loss(output, batch)` gives the mean
    over a microbatch, or its sum and the number that it is summed over: then all of a batch weigh the same, however
    they are spread. Gradients are clipped to a global norm of `clip`, if given. The module is put in training mode.
    Where `torch.distributed` has been started with several ranks, each of them runs one rank of the plan.
    """
    chosen = Plan.parse(plan) if isinstance(plan, str) else plan
    check_plan(chosen)
    check_module(module)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        chosen.check_world(dist.get_world_size())
        return ProcessEngine(module, chosen, loss=loss, optimizer=optimizer, example=example, clip=clip)
    return make_engine(module, chosen, loss=loss, optimizer=optimizer, example=example, clip=clip)
