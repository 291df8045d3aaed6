"""Places, where data lie and tasks run: a GPU, a CPU place (a thread with buffers of its own), the host, a disk."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from shardwise.dataflow.memory import Memory
from shardwise.dataflow.streams import Stream
from shardwise.environment import num_cores
from shardwise.errors import ShardwiseError
from shardwise.units import counted

_MOST_DEFAULT_CPU_PLACES = 4
_NAME = re.compile(r"(cuda|cpu):(\d+)")


class Kind(StrEnum):
    """What a place is."""

    GPU = "gpu"
    CPU = "cpu"
    HOST = "host"
    DISK = "disk"


@dataclass(slots=True, kw_only=True, eq=False)
class Place:
    """One place, with the stream that computes, the two that copy, and its memory."""

    name: str
    kind: Kind
    index: int
    device: torch.device
    compute: Stream
    inward: Stream
    outward: Stream
    memory: Memory

    @property
    def is_device(self) -> bool:
        """Whether it is there to compute, unlike the host and a disk."""
        return self.kind in (Kind.GPU, Kind.CPU)

    def __str__(self) -> str:
        return self.name


def default_names() -> list[str]:
    """All GPUs, or without one a CPU place for each core, at most four."""
    num_gpus = torch.cuda.device_count()
    if num_gpus:
        return [f"cuda:{number}" for number in range(num_gpus)]
    return [f"cpu:{number}" for number in range(min(num_cores(), _MOST_DEFAULT_CPU_PLACES))]


def check_names(names: Sequence[str]) -> None:
    """Refuse devices that do not exist, and names that are none."""
    if not names:
        raise ShardwiseError("a machine needs a device; none was given", remedy='Machine(["cpu:0"])')
    num_gpus = torch.cuda.device_count()
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            remedy = "host and disk are there by themselves" if name in ("host", "disk") else "cuda:0, or cpu:0"
            raise ShardwiseError(f"{name!r} is no device; devices are called cuda:N or cpu:N", remedy=remedy)
        if match[1] == "cuda" and int(match[2]) >= num_gpus:
            remedy = 'Machine(["cpu:0", "cpu:1"])' if num_gpus == 0 else f"cuda:{num_gpus - 1}"
            raise ShardwiseError(f"{name} does not exist: this machine has {counted(num_gpus, 'GPU')}", remedy=remedy)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ShardwiseError(f"{twice[0]} was given {names.count(twice[0])} times", remedy="each device once")
