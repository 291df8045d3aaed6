"""A rank made ready: data open, the engine made, and its numbers drawn, read from a folder, or from a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.engine.engine import Engine
from shardwise.training.balance import Balancer
from shardwise.training.checkpoint.index import clean, find_last
from shardwise.training.checkpoint.parts import Held, shapes_of
from shardwise.training.checkpoint.read import Reader, load, load_random
from shardwise.training.data.rows import AnyRows, Batch, Batches, training_and_held_out
from shardwise.training.data.source import check_data, open_data
from shardwise.training.folder import CHECKPOINTS
from shardwise.training.job import Job, check_rows
from shardwise.training.make_engine import make_engine
from shardwise.training.metrics import find_board
from shardwise.training.model import num_parameters
from shardwise.training.precision import LossScale
from shardwise.training.subject import Subject, subject_of
from shardwise.training.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a loop goes round with. `step` is how many steps the checkpoint had done; `model` and `data` what it says of
    these; `is_old` whether it is of the format that has no checksum of its index."""

    engine: Engine
    held: Held
    model: Mapping[str, Any]
    data: Mapping[str, Any]
    data_bytes: int
    batches: Batches
    held_out: AnyRows
    scale: LossScale
    balancer: Balancer
    step: int
    num_parameters: int
    flops_per_token: float
    is_old: bool = False


def check_inputs(job: Job) -> None:
    """Before any rank is started: refuse rows that cannot be shared out, data or a model that cannot be read, and
    curves that nothing here can draw.
    """
    subject_of(job.recipe, check_data(job.recipe.data))
    check_rows(job)
    if job.recipe.tensorboard:
        find_board()


def make_ready(job: Job, world: World) -> Setup:
    """Every rank calls this alike."""
    recipe = job.recipe
    tokens = open_data(recipe.data, job.folder, world)
    subject = subject_of(recipe, tokens.vocabulary)
    rows, held_out = training_and_held_out(
        tokens,
        sequence=recipe.data.sequence,
        held_out=recipe.data.held_out,
        masks=subject.masks,
        batch=recipe.batch,
    )
    batches = Batches(rows=rows, size=recipe.batch, seed=recipe.seed)
    module = subject.make(tp=job.plan.tp, device=world.device)
    shapes, count, flops = shapes_of(module), num_parameters(module), subject.flops_per_token(module)
    scale = LossScale.of(job.plan.precision, subject.loss)
    engine = make_engine(job, module, on_device(_example(job, batches), world), scale)
    held, balancer = Held(engine, shapes), Balancer(engine, recipe.balance)
    step, is_old = _restore(job, world, held, subject, scale, balancer)
    # Masks of dropout follow the step, so that a run which goes on has the same.
    engine.num_steps = step
    return Setup(
        engine=engine,
        held=held,
        model=subject.description(),
        data={
            "source": recipe.data.source,
            "digest": tokens.digest,
            "num_tokens": tokens.num_tokens,
            "tokenizer": tokens.tokenizer,
        },
        data_bytes=tokens.nbytes,
        batches=batches,
        held_out=held_out,
        scale=scale,
        balancer=balancer,
        step=step,
        num_parameters=count,
        flops_per_token=flops,
        is_old=is_old,
    )


def _restore(
    job: Job, world: World, held: Held, subject: Subject, scale: LossScale, balancer: Balancer
) -> tuple[int, bool]:
    """Clear away what was not finished, and give the engine its first numbers: of the newest checkpoint, or of the
    recipe's subject. Returns how many steps they have had, and whether they are of a checkpoint of the old format."""
    root = job.folder / CHECKPOINTS
    if world.is_first:
        clean(root)
    # The first rank alone looks, so that all go on from the same one.
    last = world.first(find_last(root))
    if last is not None:
        with Reader(last) as reader:
            balancer.take(reader.index.extra)
            load(reader, held)
            load_random(reader, world)
            scale.take(reader.index.extra)
            return reader.index.step, reader.index.is_old
    subject.fill(held)
    torch.manual_seed(job.recipe.seed * 1000 + world.rank)
    return 0, False


def _example(job: Job, batches: Batches) -> Batch:
    """A batch to split the module by. Tensor parallelism follows every number of it, and sees as much in few rows."""
    batch, plan = batches.at(0), job.plan
    return batch if plan.tp == 1 else {name: each[: plan.dp * plan.microbatches] for name, each in batch.items()}


def on_device(batch: Batch, world: World) -> Batch:
    return {name: each.to(world.device, non_blocking=True) for name, each in batch.items()}
