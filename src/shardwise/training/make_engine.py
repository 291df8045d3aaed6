"""The engine and the optimizer of a recipe."""

import math
from collections.abc import Iterable

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from shardwise.engine.engine import Engine
from shardwise.engine.parallelize import parallelize
from shardwise.training.data.rows import Batch
from shardwise.training.job import Job
from shardwise.training.precision import LossScale
from shardwise.training.recipe import OptimizerChoice


def make_engine(job: Job, module: nn.Module, example: Batch, scale: LossScale) -> Engine:
    choice = job.recipe.optimizer

    def optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return _make_optimizer(choice, parameters)

    return parallelize(
        module,
        job.plan,
        loss=scale.loss,
        optimizer=optimizer,
        example=example,
        # Without a bound the norm is asked for only where steps must be left out whose gradients are not finite.
        clip=choice.clip or (math.inf if job.recipe.precision == "fp16" else None),
        seed=job.recipe.seed,
        bucket_bytes=job.recipe.bucket_bytes,
    )


def _make_optimizer(choice: OptimizerChoice, parameters: Iterable[nn.Parameter]) -> Optimizer:
    if choice.name == "sgd":
        return SGD(parameters, lr=choice.rate, momentum=choice.beta1, weight_decay=choice.decay)
    return AdamW(parameters, lr=choice.rate, betas=(choice.beta1, choice.beta2), weight_decay=choice.decay)
