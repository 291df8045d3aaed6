"""Limits on the memory of an engine, and the number of KV blocks that fit."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from shardwise import environment
from shardwise.cluster.local import available_bytes
from shardwise.errors import ShardwiseError
from shardwise.nets.settings import Settings
from shardwise.serving.kv_folder import HeldFolder, clear_others
from shardwise.serving.tier_store import TierBytes
from shardwise.units import format_bytes

#: The share of a GPU's free memory, after weights, that may be taken; of host memory less, which others need too.
_SHARE = {"cuda": 0.92, "cpu": 0.25}
#: The most host memory that is taken unless the user asks for more.
_MOST_ON_CPU = 4 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of an engine. None: a sensible default for this machine."""

    kv_bytes: int | None = None
    max_length: int | None = None
    block_size: int = 16
    #: The most tokens in one step, and sequences.
    token_budget: int | None = None
    max_running: int | None = None
    #: Tiers for blocks that were evicted from the cache: host memory, and files in a folder.
    host_bytes: int = 0
    file_bytes: int = 0
    kv_folder: Path | None = None
    #: Whether to reload a block only where measurements say that it is faster than recomputing it.
    measured: bool = True
    #: Quantisation of the layers' weights: "fp8" or "int4".
    weights: str | None = None

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 1:
            raise ShardwiseError(
                f"--max-length {self.max_length}: a prompt has at least 1 token", remedy="--max-length 4096"
            )
        if bool(self.file_bytes) != (self.kv_folder is not None):
            # Without a budget, files of an earlier start would be removed; without a folder, a budget is meaningless.
            raise ShardwiseError(
                f"KV blocks have {format_bytes(self.file_bytes)} of files, in "
                + ("no folder" if self.kv_folder is None else f"the folder {self.kv_folder}"),
                remedy="--kv-files 64GiB --kv-folder kv, or neither",
            )

    @property
    def has_tiers(self) -> bool:
        return bool(self.host_bytes) or self.kv_folder is not None

    def tiers(self, rank: int = 0, num_ranks: int = 1) -> TierBytes:
        """Return what one of `num_ranks` ranks may hold in the tiers below its cache; each has its own files."""
        folder = self.kv_folder if self.kv_folder is None or num_ranks == 1 else self.kv_folder / f"rank-{rank}"
        return TierBytes(
            host_bytes=self.host_bytes // num_ranks, file_bytes=self.file_bytes // num_ranks, folder=folder
        )

    def of_replica(self, replica: int, num_replicas: int) -> "Limits":
        """Return the limits of one of `num_replicas` replicas: its share of every budget, and its own files."""
        if num_replicas == 1:
            return self
        return replace(
            self,
            kv_bytes=None if self.kv_bytes is None else self.kv_bytes // num_replicas,
            host_bytes=self.host_bytes // num_replicas,
            file_bytes=self.file_bytes // num_replicas,
            kv_folder=None if self.kv_folder is None else self.kv_folder / f"replica-{replica}",
        )

    def hold_folder(self) -> HeldFolder:
        """Hold the folder of the files, if there is one. Refuses one that another engine has."""
        return HeldFolder(self.kv_folder)

    def clear_folder(self, num_replicas: int = 1, num_ranks: int = 1) -> None:
        """Remove the files of engines with another number of replicas, or of ranks in each."""
        shares = [self.of_replica(replica, num_replicas) for replica in range(num_replicas)]
        used = {share.tiers(rank, num_ranks).folder for share in shares for rank in range(num_ranks)}
        clear_others(self.kv_folder, used)

    def length(self, settings: Settings, num_blocks: int) -> int:
        """Return the most tokens that a sequence can have."""
        return min(self.max_length or settings.length, settings.length, num_blocks * self.block_size)

    def of_device(self, device: torch.device) -> tuple[int, int]:
        """Return the most tokens of one step, and the most sequences in it."""
        budget = self.token_budget or (8192 if device.type == "cuda" else 512)
        running = self.max_running or min(budget, 256 if device.type == "cuda" else 64)
        if running > budget:  # Everyone who runs gets a token in every step.
            raise ShardwiseError(
                f"a step has at most {budget} tokens, one of each of {running} running requests",
                remedy=f"token_budget={running}, or max_running={budget}",
            )
        return budget, running


def device_name(device: torch.device) -> str:
    """Return the vendor's name of a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else environment.processor_name()


def free_bytes(device: torch.device) -> int:
    """Return how many free bytes of a device may be taken, with weights loaded already."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _SHARE["cuda"])
    return min(int(available_bytes() * _SHARE["cpu"]), _MOST_ON_CPU)


def check_room(limits: Limits, device: torch.device | None) -> None:
    """Refuse budgets beyond the memory that there is, before anything is allocated. Without a device, the cache is on
    several, whose memory is not known here."""
    here = available_bytes()
    there = here if device is None or device.type != "cuda" else torch.cuda.mem_get_info(device)[0]
    cache = 0 if device is None or limits.kv_bytes is None else limits.kv_bytes
    for option, asked, room in (("--kv", cache, there), ("--kv-host", limits.host_bytes, here)):
        if asked > room:
            raise ShardwiseError(
                f"{option} of {format_bytes(asked)}, and {format_bytes(room)} are free",
                remedy=f"{option} {max(room // 2 >> 20, 1)}MiB",
            )


def reserve_bytes(settings: Settings, token_budget: int, max_running: int, dtype: torch.dtype) -> int:
    """Estimate a step's peak memory beside weights and blocks: the widest activations of a layer, and logits."""
    widest = 4 * settings.width + 3 * max(settings.mlp.width, settings.width)
    if settings.mixture is not None:
        widest += 3 * settings.mixture.num_chosen * (settings.mixture.width + settings.width)
    return token_budget * widest * dtype.itemsize + 3 * max_running * settings.vocabulary * 4


def count_blocks(limits: Limits, size: int, free: int, longest: int) -> int:
    """Return how many blocks of `size` bytes fit; at least enough for one sequence of the greatest length."""
    asked = free if limits.kv_bytes is None else limits.kv_bytes
    num_blocks = asked // size
    wanted = -(-min(limits.max_length or 1, longest) // limits.block_size)
    if num_blocks < max(wanted, 1):
        whose = "there is room for" if limits.kv_bytes is None else "the KV budget is"
        raise ShardwiseError(
            f"one sequence of {limits.max_length or limits.block_size:,} tokens needs {format_bytes(wanted * size)} of"
            f" keys and values, and {whose} {format_bytes(max(asked, 0))}",
            # With no block at all there is no length that fits.
            remedy=(f"--max-length {num_blocks * limits.block_size}, or " if num_blocks else "")
            + f"--kv {wanted * size}",
        )
    return num_blocks
