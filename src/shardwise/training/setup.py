"""The setup of a rank: open data, an engine, and its state, initialised or read from a folder or a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.engine.engine import Engine
from shardwise.training.balance import Balancer
from shardwise.training.checkpoint.parts import Held, shapes_of
from shardwise.training.data.rows import AnyRows, Batch, Batches, training_and_held_out
from shardwise.training.data.source import check_data, open_data
from shardwise.training.job import Job
from shardwise.training.make_engine import make_engine
from shardwise.training.metrics import find_board
from shardwise.training.model import num_parameters
from shardwise.training.plan_check import check_plan
from shardwise.training.precision import LossScale
from shardwise.training.restoring import Restored, restore
from shardwise.training.run_copies import RunCopies, open_copies
from shardwise.training.subject import subject_of
from shardwise.training.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The inputs of the loop. `step` is the number of steps done before the checkpoint. `model` and `data` are their
    descriptions for checkpoints. `restored` is the source of the state. `copies` are those in memory, and
    `without_copies` is the reason why there are none although they are wanted."""

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
    restored: Restored
    copies: RunCopies | None = None
    without_copies: str | None = None


def check_inputs(job: Job) -> None:
    """Before any rank is started, refuse data or a model that cannot be read, a plan that cannot split the model or its
    rows, and `tensorboard` if it is not installed.
    """
    check_plan(job.recipe, job.plan, subject_of(job.recipe, check_data(job.recipe.data)))
    if job.recipe.tensorboard:
        find_board()


def make_ready(job: Job, world: World) -> Setup:
    """Set up this rank. Every rank calls this."""
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
    opened = open_copies(job, world)
    copies, without = (None, opened) if isinstance(opened, str) else (opened, None)
    restored = restore(job, world, held, subject, scale, balancer, copies)
    # Dropout masks depend on the step, so a resumed run has the same masks.
    engine.num_steps = restored.step
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
        step=restored.step,
        num_parameters=count,
        flops_per_token=flops,
        restored=restored,
        copies=copies,
        without_copies=without,
    )


def _example(job: Job, batches: Batches) -> Batch:
    """Return an example batch to split the module with. Tensor parallelism computes on it, so it gets few rows."""
    batch, plan = batches.at(0), job.plan
    return batch if plan.tp == 1 else {name: each[: plan.dp * plan.microbatches] for name, each in batch.items()}


def on_device(batch: Batch, world: World) -> Batch:
    return {name: each.to(world.device, non_blocking=True) for name, each in batch.items()}
