"""The engine and the optimizer of a recipe."""

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from shardwise.engine.engine import Engine
from shardwise.engine.parallelize import parallelize
from shardwise.engine.step_graphs import How
from shardwise.planner.plan import Offload
from shardwise.states.compact_adamw import CompactAdamW
from shardwise.torch_private import fuse
from shardwise.training.data.rows import Batch
from shardwise.training.job import Job
from shardwise.training.precision import LossScale
from shardwise.training.recipe import OptimizerChoice

_GRAPHS: dict[str, How] = {"on": True, "off": False, "auto": "auto"}


def make_engine(job: Job, module: nn.Module, example: Batch, scale: LossScale) -> Engine:
    choice = job.recipe.optimizer
    # Offloaded state is updated piece by piece, so the optimizer cannot be fused.
    may_fuse = job.plan.offload == Offload()

    device = next((each.device for each in example.values()), None)

    def optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return make_optimizer(choice, parameters, may_fuse=may_fuse, device=device)

    engine = parallelize(
        module,
        job.plan,
        loss=scale.loss,
        optimizer=optimizer,
        example=example,
        # Without clipping, only fp16 needs the norm, to skip steps whose gradients are not finite.
        clip=choice.clip or (math.inf if job.plan.precision == "fp16" else None),
        compile=job.compile,
        seed=job.recipe.seed,
        bucket_bytes=job.recipe.bucket_bytes,
        kernels=job.recipe.kernels,
        graphs=_GRAPHS[job.recipe.graphs],
    )
    if job.compile:
        scale.compile()
    return engine


def make_optimizer(
    choice: OptimizerChoice,
    parameters: Iterable[nn.Parameter],
    *,
    may_fuse: bool = True,
    device: torch.device | None = None,
) -> Optimizer:
    """Return torch's optimizer, or one with compact states. Parameters on meta will be moved to `device` later.

    On GPUs torch's optimizers are fused: one kernel for many weights, and no synchronization with the host.
    """
    given = list(parameters)
    homes = {device if each.is_meta and device is not None else each.device for each in given}
    fuses = may_fuse and bool(homes) and all(home.type == "cuda" for home in homes)
    betas = (choice.beta1, choice.beta2)
    if choice.name != "sgd" and choice.states != "fp32":
        return CompactAdamW(given, lr=choice.rate, betas=betas, weight_decay=choice.decay, states=choice.states)
    made: Optimizer
    if choice.name == "sgd":
        made = SGD(given, lr=choice.rate, momentum=choice.beta1, weight_decay=choice.decay)
    else:
        made = AdamW(given, lr=choice.rate, betas=betas, weight_decay=choice.decay)
    if fuses:
        fuse(made)
    return made
