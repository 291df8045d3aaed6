"""Places, where data live and tasks run: a GPU, a CPU place (a thread with buffers of its own), the host, a disk.

They are made from a machine's device names, with their streams and memory.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch

from shardwise.dataflow.buffers import device_memory, disk_memory, host_memory
from shardwise.dataflow.cuda import CudaStream, new_stream
from shardwise.dataflow.eviction import make_policy
from shardwise.dataflow.memory import Memory
from shardwise.dataflow.streams import Failures, Stream, ThreadStream
from shardwise.environment import num_cores
from shardwise.errors import ShardwiseError, unknown
from shardwise.units import counted, parse_bytes

#: Bytes for each place, as a number or as a text like `40 GiB`.
Budget = Mapping[str, int | str]

#: Makes a stream that runs on the CPU.
MakeStream = Callable[[str, Failures], Stream]

_MOST_DEFAULT_CPU_PLACES = 4
_NAME = re.compile(r"(cuda|cpu):(\d+)")
_ROLES = ("compute", "inward", "outward")


class Kind(StrEnum):
    """What a place is."""

    GPU = "gpu"
    CPU = "cpu"
    HOST = "host"
    DISK = "disk"


@dataclass(slots=True, kw_only=True, eq=False)
class Place:
    """One place, with its compute stream, its two copy streams and its memory."""

    name: str
    kind: Kind
    index: int
    device: torch.device
    compute: Stream
    inward: Stream
    outward: Stream
    memory: Memory

    @property
    def streams(self) -> tuple[Stream, ...]:
        return self.compute, self.inward, self.outward

    @property
    def is_device(self) -> bool:
        """Whether it can compute, unlike the host and a disk."""
        return self.kind in (Kind.GPU, Kind.CPU)

    def __str__(self) -> str:
        return self.name


def make_places(
    devices: Sequence[str] | None,
    *,
    budget: Budget,
    eviction: str,
    position: Callable[[], tuple[int, int]],
    disk: Path | str | None,
    failures: Failures,
    make_stream: MakeStream = ThreadStream,
    times: bool = False,
) -> list[Place]:
    """Make the devices in the order given, or all that exist; then the host, then the disk."""
    names = _default_names() if devices is None else list(devices)
    _check_names(names)
    folder = None if disk is None else Path(disk)
    if folder is not None and not folder.is_dir():
        raise ShardwiseError(f"there is no folder {folder} to spill to", remedy=f"mkdir -p {folder}")
    everything = [*names, "host", "disk"]
    limits = _limits(everything, budget)
    has_gpu = any(name.startswith("cuda") for name in names)
    places = []
    for index, name in enumerate(everything):
        kind = Kind(name) if name in ("host", "disk") else Kind.GPU if name.startswith("cuda") else Kind.CPU
        device = torch.device(name) if kind is Kind.GPU else torch.device("cpu")
        if kind is Kind.GPU:
            streams = _gpu_streams(name, device, failures, times=times)
        else:
            streams = {role: make_stream(f"{name} {role}", failures) for role in _ROLES}
        if kind is Kind.DISK:
            allocate, free = disk_memory(folder)
        elif kind is Kind.HOST:
            allocate, free = host_memory(is_pinned=has_gpu)
        else:
            allocate, free = device_memory(device)
        memory = Memory(allocate, free, make_policy(eviction, position), limits.get(name))
        places.append(Place(name=name, kind=kind, index=index, device=device, memory=memory, **streams))
    return places


def _gpu_streams(name: str, device: torch.device, failures: Failures, *, times: bool) -> dict[str, Stream]:
    # Compute on the user's current stream: work that user code puts there is ordered with tasks, and launches need no
    # stream switch.
    streams = [torch.cuda.current_stream(device), new_stream(device), new_stream(device)]
    return {
        role: CudaStream(f"{name} {role}", stream, failures, times=times)
        for role, stream in zip(_ROLES, streams, strict=True)
    }


def _limits(names: Sequence[str], budget: Budget) -> dict[str, int]:
    limits = {}
    for name, given in budget.items():
        if name not in names:
            raise unknown("place", name, names)
        limits[name] = parse_bytes(given) if isinstance(given, str) else given
        if limits[name] <= 0:
            raise ShardwiseError(f"a budget of {limits[name]} bytes for {name} holds nothing", remedy="at least 1 MiB")
    return limits


def _default_names() -> list[str]:
    """Return all GPUs or, without one, a CPU place for each core, at most four."""
    num_gpus = torch.cuda.device_count()
    if num_gpus:
        return [f"cuda:{number}" for number in range(num_gpus)]
    return [f"cpu:{number}" for number in range(min(num_cores(), _MOST_DEFAULT_CPU_PLACES))]


def _check_names(names: Sequence[str]) -> None:
    """Refuse devices that do not exist, and malformed names."""
    if not names:
        raise ShardwiseError("a machine needs a device; none was given", remedy='Machine(["cpu:0"])')
    num_gpus = torch.cuda.device_count()
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            remedy = "host and disk are there by themselves" if name in ("host", "disk") else "cuda:0, or cpu:0"
            raise ShardwiseError(f"{name!r} is not a device; devices are called cuda:N or cpu:N", remedy=remedy)
        if match[1] == "cuda" and int(match[2]) >= num_gpus:
            remedy = 'Machine(["cpu:0", "cpu:1"])' if num_gpus == 0 else f"cuda:{num_gpus - 1}"
            raise ShardwiseError(f"{name} does not exist: this machine has {counted(num_gpus, 'GPU')}", remedy=remedy)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ShardwiseError(f"{twice[0]} was given {names.count(twice[0])} times", remedy="each device once")
