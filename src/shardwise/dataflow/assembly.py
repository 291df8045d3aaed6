"""A machine's places, made from the names of its devices, with their streams and memory, and the host and the disk."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from shardwise.dataflow.buffers import device_memory, disk_memory, host_memory
from shardwise.dataflow.cuda import CudaStream, new_stream
from shardwise.dataflow.eviction import make_policy
from shardwise.dataflow.memory import Memory
from shardwise.dataflow.place import Kind, Place, check_names, default_names
from shardwise.dataflow.streams import Failures, Stream, ThreadStream
from shardwise.errors import ShardwiseError, unknown
from shardwise.units import parse_bytes

#: Bytes for each place, as a number or as a text like `40 GiB`.
Budget = Mapping[str, int | str]

#: Makes a stream that runs on the CPU.
MakeStream = Callable[[str, Failures], Stream]


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
    """The devices in the order given, or all that there are; then the host, then the disk."""
    names = default_names() if devices is None else list(devices)
    check_names(names)
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
            streams = [make_stream(f"{name} {role}", failures) for role in ("compute", "inward", "outward")]
        if kind is Kind.DISK:
            allocate, free = disk_memory(folder)
        elif kind is Kind.HOST:
            allocate, free = host_memory(is_pinned=has_gpu)
        else:
            allocate, free = device_memory(device)
        memory = Memory(allocate, free, make_policy(eviction, position), limits.get(name))
        compute, inward, outward = streams
        places.append(
            Place(
                name=name,
                kind=kind,
                index=index,
                device=device,
                compute=compute,
                inward=inward,
                outward=outward,
                memory=memory,
            )
        )
    return places


def _gpu_streams(name: str, device: torch.device, failures: Failures, *, times: bool) -> list[Stream]:
    # What a user's own code puts on the current stream is then in order with tasks, and a launch need not switch.
    compute = torch.cuda.current_stream(device)
    copies = [new_stream(device) for _ in range(2)]
    roles = ("compute", "inward", "outward")
    return [
        CudaStream(f"{name} {role}", stream, failures, times=times)
        for role, stream in zip(roles, [compute, *copies], strict=True)
    ]


def _limits(names: Sequence[str], budget: Budget) -> dict[str, int]:
    limits = {}
    for name, given in budget.items():
        if name not in names:
            raise unknown("place", name, names)
        limits[name] = parse_bytes(given) if isinstance(given, str) else given
        if limits[name] <= 0:
            raise ShardwiseError(f"a budget of {limits[name]} bytes for {name} holds nothing", remedy="at least 1 MiB")
    return limits
