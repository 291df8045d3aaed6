"""An engine put together over a model that has its weights: how many blocks there is room for, and who uses them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shardwise import environment
from shardwise.cluster.local import available_bytes
from shardwise.errors import ShardwiseError
from shardwise.nets.settings import Settings
from shardwise.nets.transformer import Transformer
from shardwise.planner.plan import Plan
from shardwise.serving.blocks import BlockPool
from shardwise.serving.device_runner import make_runner
from shardwise.serving.engine import LLMEngine
from shardwise.serving.forecast import Forecast, forecast
from shardwise.serving.kv_cache import block_bytes, make_cache
from shardwise.serving.narrow_weights import narrow, num_parameters, weight_bytes
from shardwise.serving.runner import Runner
from shardwise.serving.scheduler import Scheduler
from shardwise.serving.summary import Summary
from shardwise.serving.tier_store import TierBytes, make_store
from shardwise.serving.tiers import Tiers
from shardwise.training.machine import cluster_here
from shardwise.units import format_bytes

#: Of what a GPU has free when weights are in, this much may be taken; of a host's memory less, which others need too.
_SHARE = {"cuda": 0.92, "cpu": 0.25}
#: More than this no laptop should give without being asked.
_MOST_ON_CPU = 4 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an engine may take. None: as much as is sensible here."""

    kv_bytes: int | None = None
    max_length: int | None = None
    block_size: int = 16
    #: Tokens of one step, and sequences.
    token_budget: int | None = None
    max_running: int | None = None
    #: For blocks that had to leave the cache: host memory, and files in a folder.
    host_bytes: int = 0
    file_bytes: int = 0
    kv_folder: Path | None = None
    #: Whether a block is reloaded only where that was measured to be faster than computing it.
    measured: bool = True
    #: Weights of layers in fewer bits: "fp8" or "int4".
    weights: str | None = None

    def __post_init__(self) -> None:
        if bool(self.file_bytes) != (self.kv_folder is not None):
            # Without a budget the files of an earlier start would go; without a folder a budget is for nothing.
            raise ShardwiseError(
                f"KV blocks have {format_bytes(self.file_bytes)} of files, in "
                + ("no folder" if self.kv_folder is None else f"the folder {self.kv_folder}"),
                remedy="--kv-files 64GiB --kv-folder kv, or neither",
            )

    @property
    def has_tiers(self) -> bool:
        return bool(self.host_bytes) or self.kv_folder is not None

    def tiers(self, rank: int = 0, num_ranks: int = 1) -> TierBytes:
        """What one of so many ranks may hold beneath its cache; each has files of its own."""
        folder = self.kv_folder if self.kv_folder is None or num_ranks == 1 else self.kv_folder / f"rank-{rank}"
        return TierBytes(
            host_bytes=self.host_bytes // num_ranks, file_bytes=self.file_bytes // num_ranks, folder=folder
        )

    def of_device(self, device: torch.device) -> tuple[int, int]:
        """The tokens of one step, and the most sequences in it."""
        budget = self.token_budget or (8192 if device.type == "cuda" else 512)
        return budget, self.max_running or min(budget, 256 if device.type == "cuda" else 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a model is called, where its tokenizer lies ("bytes": nowhere), and which tokens end a text.

    `fingerprint` is part of the names of its blocks: another model's are never found.
    """

    name: str = "model"
    fingerprint: str = ""
    tokenizer_source: str = "bytes"
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)


def assemble(
    model: Transformer, limits: Limits | None = None, identity: Identity | None = None, *, seed: int | None = None
) -> LLMEngine:
    """An engine on the device that the model is on."""
    limits, identity = limits or Limits(), identity or Identity()
    narrow(model, limits.weights)
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
    max_length = min(limits.max_length or settings.length, settings.length, num_blocks * limits.block_size)
    runner = make_runner(model, cache, max_running=max_running, max_length=max_length)
    return make_engine(
        runner, scheduler, settings, limits, identity, room, dtype=dtype, device=device, tiers=tiers,
        seed=seed,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes of an engine by part: of the fullest rank, where there are several."""

    num_ranks: int
    num_parameters: int
    weight_bytes: int
    reserve_bytes: int
    block_bytes: int


def make_engine(
    runner: Runner, scheduler: Scheduler, settings: Settings, limits: Limits, identity: Identity, room: Room, *,
    dtype: torch.dtype, device: torch.device, tiers: Tiers | None = None, seed: int | None = None,
    plan: Plan | None = None,
) -> LLMEngine:  # fmt: skip
    """The engine over a runner that has its blocks, and what is told of it."""
    num_blocks = scheduler.pool.num_blocks
    max_length = min(limits.max_length or settings.length, settings.length, num_blocks * limits.block_size)
    summary = Summary(
        model=identity.name,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else environment.processor_name(),
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
        forecast=_forecast(settings, plan or Plan(), scheduler, dtype),
    )
    return LLMEngine(
        runner,
        scheduler,
        summary=summary,
        vocabulary_size=settings.vocabulary,
        max_length=max_length,
        eos_token_ids=identity.eos_token_ids,
        tokenizer_source=identity.tokenizer_source,
        model_name=f"{identity.name}/{identity.fingerprint}/{dtype}/{limits.weights}/{limits.block_size}",
        tiers=tiers,
        seed=seed,
    )


def _forecast(settings: Settings, plan: Plan, scheduler: Scheduler, dtype: torch.dtype) -> Forecast | None:
    """What the planner predicts, where it knows the device and the model."""
    try:
        return forecast(
            settings, cluster_here(plan.num_ranks), plan, num_blocks=scheduler.pool.num_blocks,
            block_size=scheduler.pool.block_size, max_running=scheduler.max_running, width=dtype.itemsize,
        )  # fmt: skip
    except ShardwiseError:
        return None


def make_tiers(limits: Limits, data: torch.Tensor, pool: BlockPool) -> Tiers | None:
    """What lies beneath a cache, if anything was asked for."""
    if not limits.has_tiers:
        return None
    return Tiers(make_store(data, limits.tiers()), pool, measured=limits.measured)


def free_bytes(device: torch.device) -> int:
    """What is free on a device, weights being there already, and may be taken."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _SHARE["cuda"])
    return min(int(available_bytes() * _SHARE["cpu"]), _MOST_ON_CPU)


def reserve_bytes(settings: Settings, token_budget: int, max_running: int, dtype: torch.dtype) -> int:
    """What a step holds at its fullest beside weights and blocks, roughly: the widest rows of a layer, and logits."""
    widest = 4 * settings.width + 3 * max(settings.mlp.width, settings.width)
    if settings.mixture is not None:
        widest += 3 * settings.mixture.num_chosen * (settings.mixture.width + settings.width)
    return token_budget * widest * dtype.itemsize + 3 * max_running * settings.vocabulary * 4


def count_blocks(limits: Limits, size: int, free: int, longest: int) -> int:
    """How many blocks of so many bytes there is room for: one sequence of the greatest length at least."""
    asked = free if limits.kv_bytes is None else limits.kv_bytes
    num_blocks = asked // size
    wanted = -(-min(limits.max_length or 1, longest) // limits.block_size)
    if num_blocks < max(wanted, 1):
        whose = "there is room for" if limits.kv_bytes is None else "the KV budget is"
        raise ShardwiseError(
            f"one sequence of {limits.max_length or limits.block_size:,} tokens needs {format_bytes(wanted * size)} of"
            f" keys and values, and {whose} {format_bytes(max(asked, 0))}",
            remedy=f"max_length={max(num_blocks, 1) * limits.block_size}, or kv_bytes={wanted * size}",
        )
    return num_blocks


def ends(found: int | Iterable[int] | None) -> frozenset[int]:
    """`eos_token_id` as configurations have it: one, several, none."""
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)
