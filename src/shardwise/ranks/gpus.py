"""The GPUs of this machine, and checks of them before anything starts.

Only `find_gpus` asks torch and the machine. All decisions are made from the value that it returns, so that they can be
tested for machines that are not here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal

import torch

from shardwise import environment
from shardwise.errors import ShardwiseError, some
from shardwise.planner.plan import FP8_SCALES
from shardwise.units import counted, format_bytes

#: Which GPUs the ranks of one machine compute on.
Gpus = Literal["own", "shared", "none"]
#: The first compute capability with bf16: Ampere.
_BF16 = (8, 0)
#: The first compute capability with fp8 matmuls: Ada, and Hopper after it.
_FP8 = (8, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as torch describes it."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.name} ({format_bytes(self.memory_bytes)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The GPUs that a process may use; the number that the machine has; `visible` is CUDA_VISIBLE_DEVICES.

    `cuda` is the release that torch was built for; None if it was built without CUDA.
    """

    gpus: tuple[Gpu, ...] = ()
    num_in_machine: int = 0
    visible: str | None = None
    cuda: str | None = None

    @property
    def num_hidden(self) -> int:
        return max(self.num_in_machine - len(self.gpus), 0) if self.visible is not None else 0

    @property
    def hides_all(self) -> bool:
        """Whether CUDA_VISIBLE_DEVICES names no GPU of this machine for certain; a name (GPU-..., MIG-...) may be any.

        CUDA reads up to the first number that no GPU has, and takes none if one comes twice.
        """
        words = [word.strip() for word in (self.visible or "").split(",")]
        if words[0].startswith(("GPU-", "MIG-")):
            return False
        found = [int(word) for word in takewhile(str.isdecimal, words)]
        found = list(takewhile(lambda number: number < self.num_in_machine, found))
        return not found or len({*found}) < len(found)


def find_gpus() -> Found:
    """Return the GPUs that this process may use."""
    if environment.place_under_torchrun() is not None:
        environment.keep_streams_apart()  # Before CUDA starts, which asking does.
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Found(
        gpus=tuple(gpu_of(number) for number in range(count)),
        num_in_machine=max(count, len(list(Path("/dev").glob("nvidia[0-9]*")))),
        visible=environment.find_variable("CUDA_VISIBLE_DEVICES"),
        cuda=torch.version.cuda,
    )


def gpu_of(device: torch.device | int) -> Gpu:
    """Return torch's description of one GPU."""
    found = torch.cuda.get_device_properties(device)
    return Gpu(name=found.name, memory_bytes=found.total_memory, capability=(found.major, found.minor))


def check_any(found: Found, asked: str, instead: str) -> None:
    """Refuse to compute on GPUs where there are none. `asked` are the words that ask for them."""
    if found.gpus:
        return
    if found.cuda is None:
        why = f"torch {torch.__version__} was built without CUDA"
        remedy = "pip install torch --index-url https://download.pytorch.org/whl/cu128"
    elif found.num_hidden and found.hides_all:
        why = f"CUDA_VISIBLE_DEVICES={found.visible} hides {_all_of(found.num_in_machine)} of this machine"
        remedy = f"CUDA_VISIBLE_DEVICES={','.join(map(str, range(found.num_in_machine)))}"
    elif found.num_hidden:
        here = counted(found.num_in_machine, "GPU")
        why = f"this machine has {here}, and under CUDA_VISIBLE_DEVICES={found.visible} the driver gives torch none"
        remedy = "nvidia-smi -L, which lists the GPUs with their names, or says what is wrong with the driver"
    elif found.num_in_machine:
        why = f"this machine has {counted(found.num_in_machine, 'GPU')}, and its driver does not answer torch"
        remedy = "nvidia-smi, which says what is wrong with the driver"
    else:
        why = f"torch was built for CUDA {found.cuda}, and this machine has no driver, or no GPU (no /dev/nvidia0)"
        remedy = "nvidia-smi, which shows the driver and its GPUs"
    raise ShardwiseError(f"{asked}: {why}", remedy=f"{remedy}; or {instead}")


def _all_of(count: int) -> str:
    return "the GPU" if count == 1 else f"all {count} GPUs"


def check_one_each(found: Found, num_ranks: int, *, where: str = "this machine") -> None:
    """Refuse more ranks than GPUs, unless there are none at all: then ranks compute on processors."""
    here = len(found.gpus)
    if not 0 < here < num_ranks:
        return
    hidden = ""
    if found.num_hidden:
        hidden = f" ({found.num_hidden} more hidden by CUDA_VISIBLE_DEVICES={found.visible})"
    shown = (
        f"CUDA_VISIBLE_DEVICES={','.join(map(str, range(num_ranks)))}; or " if found.num_in_machine >= num_ranks else ""
    )
    launched = environment.place_under_torchrun() is not None
    fewer = f"torchrun --nproc-per-node {here}" if launched else f"--devices {here}"
    share = "SHARDWISE_SHARE_GPUS=1" if launched else "--share-gpus"
    raise ShardwiseError(
        f"{counted(num_ranks, 'rank')} and {counted(here, 'GPU')} on {where}{hidden}: each rank computes on one of its"
        " own",
        remedy=f"{shown}{fewer}; or {share}, to check the plan on what is here; or CUDA_VISIBLE_DEVICES=, for CPUs",
    )


def check_precision(gpus: Sequence[Gpu], precision: str, remedy: str, *, key: str = "precision") -> None:
    """Refuse bf16 on a GPU that has none: it would be computed as fp32, many times slower. And so of fp8.

    `key` is what a user types a precision after.
    """
    old = [gpu for gpu in gpus if gpu.capability < _BF16]
    if precision == "bf16" and old:
        major, minor = old[0].capability
        raise ShardwiseError(
            f"precision=bf16: {old[0].name} is of compute capability {major}.{minor}, and bf16 needs 8.0 (Ampere) or"
            " newer",
            remedy=remedy,
        )
    if precision in FP8_SCALES and not environment.wants_emulated_fp8():
        _check_fp8(gpus, precision, key)


def _check_fp8(gpus: Sequence[Gpu], precision: str, key: str) -> None:
    """Refuse products of 8-bit numbers where they would be emulated. Without a GPU, processors compute."""
    old = next((gpu for gpu in gpus if gpu.capability < _FP8), None)
    instead, why = "bf16", None
    if not gpus:
        instead, why = "fp32", "processors have no products of 8-bit numbers"
    elif torch.version.hip is not None:
        why = f"on {gpus[0].name} it has not been tried"
    elif old is not None:
        major, minor = old.capability
        why = f"{old.name} is of compute capability {major}.{minor}, and products of 8-bit numbers need 8.9 or newer"
    if why is not None:
        raise ShardwiseError(
            f"precision={precision}: {why}",
            remedy=f"{key}={instead}; or {environment.EMULATE_FP8}=1, which computes the same numbers slowly",
        )


def check_fits(needed: float, gpu: Gpu, *, what: str, remedy: str, sharing: int = 1) -> None:
    """Refuse what a GPU has no room for, where `sharing` ranks share it."""
    room = gpu.memory_bytes / sharing
    if needed <= room:
        return
    shared = f", of which each of {sharing} ranks has {format_bytes(room)}" if sharing > 1 else ""
    raise ShardwiseError(
        f"{what} needs {format_bytes(needed)} on a rank, and {gpu.name} has {format_bytes(gpu.memory_bytes)}{shared}"
        f" ({format_bytes(needed - room)} short)",
        remedy=remedy,
    )


def check_room(needed: int, free: int, gpu: Gpu, module: str) -> None:
    """Refuse to put a module on a GPU that has less free: all of it goes there before it is shared out."""
    if needed <= free:
        return
    raise ShardwiseError(
        f"{module} has {format_bytes(needed)} of weights elsewhere that go to {gpu.name} whole before they are shared"
        f" out, and it has {format_bytes(free)} free of {format_bytes(gpu.memory_bytes)}"
        f" ({format_bytes(needed - free)} short)",
        remedy='with torch.device("meta"): make the module there, and engine.load_state_dict its weights: each rank'
        " gets those of its own part",
    )


def describe_mixed(gpus: Sequence[Gpu]) -> str | None:
    """Describe ranks with different GPUs: which ranks have which, and the consequence; None if all are alike."""
    kinds: dict[Gpu, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        kinds.setdefault(gpu, []).append(rank)
    if len(kinds) < 2:
        return None
    told = ", ".join(f"{gpu} on {_ranks(ranks)}" for gpu, ranks in kinds.items())
    least = min(kinds, key=lambda gpu: gpu.memory_bytes)
    return (
        f"ranks have different GPUs: {told}. Every step waits for the slowest of them, and a plan has to fit"
        f" {format_bytes(least.memory_bytes)}\n  try: layers= with fewer layers on slower ones, or ranks of one kind"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + some(list(map(str, ranks)))
