"""A rank made ready: data open, the engine made, and its numbers drawn, read from a folder, or from a checkpoint."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from shardwise.engine.engine import Engine
from shardwise.engine.parallelize import parallelize
from shardwise.planner.plan import Plan
from shardwise.training.balance import Balancer
from shardwise.training.checkpoint.boxes import whole_box
from shardwise.training.checkpoint.index import clean, find_last
from shardwise.training.checkpoint.parts import Held, Part, shapes_of
from shardwise.training.checkpoint.read import Reader, load
from shardwise.training.data.documents import STDLIB
from shardwise.training.data.make import make_tokens
from shardwise.training.data.rows import Batch, Batches, Rows, training_and_held_out
from shardwise.training.data.tokenizer import ByteTokenizer
from shardwise.training.data.tokens import Tokens, open_tokens
from shardwise.training.folder import CHECKPOINTS
from shardwise.training.model import num_parameters
from shardwise.training.precision import LossScale
from shardwise.training.recipe import OptimizerChoice, Recipe
from shardwise.training.subject import Subject, subject_of
from shardwise.training.world import World

_RANDOM = "random"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank of a run is told."""

    recipe: Recipe
    plan: Plan
    folder: Path
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a loop goes round with. `step` is how many steps the checkpoint had done, `model` what one says of it."""

    engine: Engine
    held: Held
    model: Mapping[str, Any]
    tokens: Tokens
    batches: Batches
    held_out: Rows
    scale: LossScale
    balancer: Balancer
    step: int
    num_parameters: int
    flops_per_token: float


def make_ready(job: Job, world: World) -> Setup:
    """Every rank calls this alike."""
    recipe = job.recipe
    if world.is_first:
        clean(job.folder / CHECKPOINTS)
    tokens = open_data(job, world)
    rows, held_out = training_and_held_out(
        tokens,
        sequence=recipe.data.sequence,
        held_out=recipe.data.held_out,
        masks=recipe.data.masks,
        batch=recipe.batch,
    )
    batches = Batches(rows=rows, size=recipe.batch, seed=recipe.seed)
    subject = subject_of(recipe, tokens.vocabulary)
    module = subject.make(tp=job.plan.tp, device=world.device)
    shapes, count, flops = shapes_of(module), num_parameters(module), subject.flops_per_token(module)
    scale = LossScale.of(recipe.precision, subject.loss)
    engine = _make_engine(job, module, on_device(_example(job.plan, batches), world), scale)
    held, balancer = Held(engine, shapes), Balancer(engine, recipe.balance)
    step = _fill(job, world, held, subject, scale, balancer)
    # Masks of dropout follow the step, so that a run which goes on has the same.
    engine.num_steps = step
    return Setup(
        engine=engine,
        held=held,
        model=subject.description(),
        tokens=tokens,
        batches=batches,
        held_out=held_out,
        scale=scale,
        balancer=balancer,
        step=step,
        num_parameters=count,
        flops_per_token=flops,
    )


def open_data(job: Job, world: World) -> Tokens:
    """The token file of a run. That of the standard library is made once, in the run's folder."""
    choice = job.recipe.data
    if choice.source != STDLIB:
        return open_tokens(Path(choice.source))
    path = job.folder / f"{STDLIB}-{choice.limit_bytes}.tokens"
    if world.is_first and not path.is_file():
        make_tokens([STDLIB], path, ByteTokenizer(), limit_bytes=choice.limit_bytes)
    world.wait()
    return open_tokens(path)


def _example(plan: Plan, batches: Batches) -> Batch:
    """A batch to split the module by. Tensor parallelism follows every number of it, and sees as much in few rows."""
    batch = batches.at(0)
    return batch if plan.tp == 1 else {name: each[: plan.dp * plan.microbatches] for name, each in batch.items()}


def on_device(batch: Batch, world: World) -> Batch:
    return {name: each.to(world.device, non_blocking=True) for name, each in batch.items()}


def _make_engine(job: Job, module: nn.Module, example: Batch, scale: LossScale) -> Engine:
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


def _fill(job: Job, world: World, held: Held, subject: Subject, scale: LossScale, balancer: Balancer) -> int:
    """Numbers for the engine; returns how many steps they have had."""
    # The first rank alone looks, so that all go on from the same one.
    last = world.first(find_last(job.folder / CHECKPOINTS))
    if last is not None:
        with Reader(last) as reader:
            balancer.take(reader.index.extra)
            load(reader, held)
            load_random(reader, world)
            scale.take(reader.index.extra)
            return reader.index.step
    subject.fill(held)
    torch.manual_seed(job.recipe.seed * 1000 + world.rank)
    return 0


def random_parts(world: World) -> list[Part]:
    """The states of this rank's random numbers, as parts of a checkpoint."""
    states = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(world.device)
    return [
        Part(f"{_RANDOM}/{kind}/{world.rank}", tuple(state.shape), whole_box(state.shape), state)
        for kind, state in states.items()
    ]


def load_random(reader: Reader, world: World) -> None:
    """Random numbers go on as they were. A rank that was not there before has its own, from the step."""
    setters: dict[str, Any] = {"cpu": torch.set_rng_state}
    if world.device.type == "cuda":
        setters["cuda"] = lambda state: torch.cuda.set_rng_state(state, world.device)
    torch.manual_seed(reader.index.step * 1000 + world.rank)
    for kind, set_state in setters.items():
        entry = f"{_RANDOM}/{kind}/{world.rank}"
        if entry in reader.index.entries:
            set_state(reader.whole(entry).clone())
