"""Assemble an engine over a model whose weights are loaded: count the KV blocks that fit, and connect the parts."""

from dataclasses import dataclass, field

import torch

from shardwise.nets.settings import Settings
from shardwise.nets.transformer import Transformer
from shardwise.planner.plan import Plan
from shardwise.serving.blocks import BlockPool
from shardwise.serving.device_runner import make_runner
from shardwise.serving.engine import LLMEngine
from shardwise.serving.forecast import forecast_here
from shardwise.serving.generation_config import NONE, Suggested
from shardwise.serving.kv_cache import block_bytes, make_cache
from shardwise.serving.limits import Limits, check_room, count_blocks, device_name, free_bytes, reserve_bytes
from shardwise.serving.narrow_weights import narrow, num_parameters, weight_bytes
from shardwise.serving.runner import Runner
from shardwise.serving.scheduler import Scheduler
from shardwise.serving.summary import Summary
from shardwise.serving.tiers import Tiers, make_tiers


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A model's name, where its tokenizer is ("bytes" if it has none), the tokens that end a text, and the sampling
    that its authors suggest.

    `fingerprint` is part of the names of its blocks, so that blocks of another model are never found.
    """

    name: str = "model"
    fingerprint: str = ""
    tokenizer_source: str = "bytes"
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)
    suggested: Suggested = NONE


def assemble(
    model: Transformer, limits: Limits | None = None, identity: Identity | None = None, *, seed: int | None = None
) -> LLMEngine:
    """Make an engine on the device of the model."""
    limits, identity = limits or Limits(), identity or Identity()
    narrow(model, limits.weights)
    check_room(limits, model.embed.weight.device)
    settings, device, dtype = model.settings, model.embed.weight.device, model.embed.weight.dtype
    token_budget, max_running = limits.of_device(device)
    size = block_bytes(settings, settings.num_layers, dtype, limits.block_size)
    reserve = reserve_bytes(settings, token_budget, max_running, dtype)
    num_blocks = count_blocks(limits, size, free_bytes(device) - reserve, settings.length)
    pool = BlockPool(num_blocks, limits.block_size)
    cache = make_cache(settings, settings.num_layers, num_blocks, limits.block_size, dtype, device)
    tiers = make_tiers(limits, cache.data, pool)
    scheduler = Scheduler(pool, token_budget=token_budget, max_running=max_running, beneath=tiers)
    room = Room(
        num_ranks=1,
        num_parameters=num_parameters(model),
        weight_bytes=weight_bytes(model),
        reserve_bytes=reserve,
        block_bytes=size,
    )
    runner = make_runner(model, cache, max_running=max_running, max_length=limits.length(settings, num_blocks))
    return make_engine(
        runner, scheduler, settings, limits, identity, room, dtype=dtype, device=device, tiers=tiers,
        seed=seed,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes of an engine by part; with several ranks, those of the fullest."""

    num_ranks: int
    num_parameters: int
    weight_bytes: int
    reserve_bytes: int
    block_bytes: int


def make_engine(
    runner: Runner, scheduler: Scheduler, settings: Settings, limits: Limits, identity: Identity, room: Room, *,
    dtype: torch.dtype, device: torch.device, tiers: Tiers | None = None, seed: int | None = None,
    plan: Plan | None = None, split: str = "",
) -> LLMEngine:  # fmt: skip
    """Make the engine over a runner whose blocks are allocated, with its summary. `split` says which part of a block
    each rank has.
    """
    num_blocks = scheduler.pool.num_blocks
    max_length = limits.length(settings, num_blocks)
    num_shards = 1 if plan is None else plan.tp * plan.pp * plan.ep
    summary = Summary(
        model=identity.name,
        device=device_name(device),
        precision=str(dtype).removeprefix("torch.") + (f", weights in {limits.weights}" if limits.weights else ""),
        num_ranks=room.num_ranks,
        num_parameters=room.num_parameters,
        weight_bytes=room.weight_bytes,
        kv_bytes=num_blocks * room.block_bytes,
        reserve_bytes=room.reserve_bytes,
        num_blocks=num_blocks,
        block_size=limits.block_size,
        block_bytes=room.block_bytes,
        max_length=max_length,
        plan="" if plan is None else str(plan),
        host_bytes=limits.host_bytes // num_shards,
        file_bytes=limits.file_bytes // num_shards,
        forecast=forecast_here(
            settings,
            plan,
            num_blocks=num_blocks,
            block_size=limits.block_size,
            max_running=scheduler.max_running,
            width=dtype.itemsize,
            weights=limits.weights,
        ),
    )
    if tiers is not None and summary.forecast is not None:
        tiers.speeds.predicted = summary.forecast.first_token_seconds / summary.forecast.prompt
    return LLMEngine(
        runner,
        scheduler,
        summary=summary,
        vocabulary_size=settings.vocabulary,
        max_length=max_length,
        eos_token_ids=identity.eos_token_ids,
        tokenizer_source=identity.tokenizer_source,
        # Whatever the bytes of a block depend on: files are kept over restarts.
        model_name=f"{identity.name}/{identity.fingerprint}/{settings}/{dtype}/{limits.weights}/{limits.block_size}/{split}",
        tiers=tiers,
        seed=seed,
    )
