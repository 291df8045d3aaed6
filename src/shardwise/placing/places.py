"""The places that a user names: which device each is, how much room it has, how fast it is; and how to use them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import nn

from shardwise.cluster.local import available_bytes
from shardwise.errors import ShardwiseError, unknown
from shardwise.units import counted, parse_bytes

#: Matmuls of this size measure the speed of a device. On a GPU several are launched at once, so that it does not idle.
_TRIED_SIZE, _TRIED_SIZE_OF_GPUS, _TRIED_AT_ONCE = 1024, 4096, 8
#: Copies of this many bytes measure the speed of the host's memory.
_TRIED_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One place. Those of the CPU are threads: `cpu:0` and `cpu:1` are two names for one device and one memory."""

    name: str
    device: torch.device
    room_bytes: int
    speed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceOptions:
    """How a module is to be placed."""

    microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int | None = None
    moments: int = 2
    through_blocks: bool = False
    host: str = "auto"
    folder: Path | str | None = None
    #: The part of activations on the host; None is what there is no room for.
    activations_on_host: float | None = None


def find_places(
    devices: Sequence[str],
    *,
    budget: Mapping[str, str | int] | None = None,
    speeds: Mapping[str, float] | None = None,
    held_bytes: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Place, ...]:
    """Return the places of these names. Room is free memory, or the user's budget; speed is measured if kinds differ.

    `held_bytes` are in the host's memory already, and count as room there: they are what is to be placed. `dtype` is
    that of what is multiplied.
    """
    names = [_full_name(each) for each in ([devices] if isinstance(devices, str) else devices)]
    _check_names(names)
    budgets = {
        _known(name, names, "budget"): parse_bytes(size) if isinstance(size, str) else size
        for name, size in (budget or {}).items()
    }
    given = {_known(name, names, "speeds"): speed for name, speed in (speeds or {}).items()}
    for name, speed in given.items():
        if not speed > 0:
            raise ShardwiseError(
                f"the speed of {name} is {speed}, and must be over 0", remedy=f'speeds={{"{name}": 1.0}}'
            )
    where = {name: _device(name) for name in names}
    num_host = sum(device.type == "cpu" for device in where.values())
    found = given if len(given) == len(names) else {**_speeds(where, dtype), **given}
    return tuple(
        Place(
            name=name,
            device=device,
            room_bytes=budgets[name] if name in budgets else _free_bytes(device, held_bytes, num_host),
            speed=found[name],
        )
        for name, device in where.items()
    )


def _full_name(name: str) -> str:
    return f"{name}:0" if name in ("cuda", "mps", "xpu") else name


def _check_names(names: Sequence[str]) -> None:
    if not names:
        raise ShardwiseError("no device is named", remedy='devices=["cuda:0", "cuda:1"], or devices=["cpu:0", "cpu:1"]')
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ShardwiseError(
            f"{twice[0]} is named {Counter(names)[twice[0]]} times; a device is one place",
            remedy=f"devices={list(dict.fromkeys(names))}",
        )


def _known(name: str, names: Sequence[str], what: str) -> str:
    full = _full_name(name)
    if full not in names:
        raise unknown(f"device in {what}", name, names)
    return full


def _device(name: str) -> torch.device:
    kind, _, index = name.partition(":")
    if kind == "cpu" and (index == "" or index.isdecimal()):
        return torch.device("cpu")
    if kind != "cuda" or not index.isdecimal():
        raise unknown("device", name, ["cpu", "cpu:0", "cpu:1", *_gpus()])
    if name not in _gpus():
        there = f"this machine has {counted(len(_gpus()), 'GPU')}"
        raise ShardwiseError(
            f"there is no {name}: {there}" + (f", {', '.join(_gpus())}" if _gpus() else ""),
            remedy=f"devices={[*_gpus(), 'cpu'] if _gpus() else ['cpu:0', 'cpu:1']}",
        )
    return torch.device(name)


def _gpus() -> list[str]:
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


def _free_bytes(device: torch.device, held_bytes: int, num_host: int) -> int:
    """Return the usable memory of a device. Places on the CPU share the host's memory equally."""
    if device.type == "cpu":
        return (available_bytes() + held_bytes) // num_host
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _speeds(where: Mapping[str, torch.device], dtype: torch.dtype) -> dict[str, float]:
    """Return the speed of each place as a multiple of the first. Places of one kind are equal."""
    kinds = {
        name: device.type if device.type == "cpu" else torch.cuda.get_device_name(device)
        for name, device in where.items()
    }
    if len(set(kinds.values())) == 1:
        return dict.fromkeys(where, 1.0)
    of_kind = {kind: matmul_flops(where[name], dtype) for name, kind in kinds.items()}
    first = of_kind[next(iter(kinds.values()))]
    return {name: of_kind[kind] / first for name, kind in kinds.items()}


def matmul_flops(device: torch.device, dtype: torch.dtype, size: int | None = None) -> float:
    """FLOPs a second in square matmuls, the best of a few."""
    usual, count = (_TRIED_SIZE, 1) if device.type == "cpu" else (_TRIED_SIZE_OF_GPUS, _TRIED_AT_ONCE)
    size = size or usual
    tried = torch.ones(size, size, device=device, dtype=dtype)
    made = torch.empty_like(tried)
    seconds = []
    for _ in range(5):
        start = perf_counter()
        for _ in range(count):
            torch.mm(tried, tried, out=made)
        float(made[0, 0])  # Waits for it.
        seconds.append(perf_counter() - start)
    return 2 * size**3 * count / min(seconds)


def multiplied(module: nn.Module) -> torch.dtype:
    """Return the dtype of most of a module's weights, or one that matmuls support."""
    sizes: Counter[torch.dtype] = Counter()
    for each in module.parameters():
        sizes[each.dtype] += each.numel()
    (found, _), *_ = sizes.most_common(1) or [(torch.float32, 0)]
    return found if found in (torch.float32, torch.float64, torch.bfloat16, torch.float16) else torch.float32


def copied_bytes_per_second() -> float:
    """Return the bytes per second that the host's memory reads and writes in a copy, the best of a few."""
    source = torch.zeros(_TRIED_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(3):
        start = perf_counter()
        target.copy_(source)
        seconds.append(perf_counter() - start)
    return 2 * _TRIED_BYTES / min(seconds)
