"""Measure one device: matmuls by dtype, copies in its memory, transfers from and to the host, and the host's disk.

Matmuls use random numbers: multiplying zeros takes a GPU less power, so it would run faster than on real data.
"""

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

from shardwise import environment
from shardwise.cluster.local import available_bytes, memory_bytes
from shardwise.cluster.probe import DeviceFigures
from shardwise.dataflow.cuda import new_event, new_stream
from shardwise.probing.kernels import measure_kernels
from shardwise.probing.steady import Steady, steady
from shardwise.probing.whole_steps import Crowd
from shardwise.torch_private import scaled_mm
from shardwise.training.world import World

#: The most seconds for each measurement.
LIMIT_SECONDS = 0.6
#: Measurements per device: matmuls of four dtypes on a GPU, copies, host transfers (three), the disk (two).
NUM_FIGURES = 10
_TYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_GPU_SIZE, _CPU_SIZE = 8192, 512
_GPU_COPIED, _CPU_COPIED, _MOVED, _DISK = 2**30, 2**26, 2**28, 2**25
_BLOCK = 2**20
#: The first compute capability with fp8 matmuls.
_FP8 = (8, 9)


def measure_device(device: torch.device, host: str, name: str, sharing: int, world: World) -> DeviceFigures:
    """Measure the device of this rank, which shares the memory of its host with `sharing` ranks. Every rank calls
    this."""
    found: list[Steady] = []

    def rate(amount: float, once: Callable[[], float]) -> float:
        measured = steady(once, limit_seconds=LIMIT_SECONDS)
        found.append(measured)
        return amount / measured.seconds

    is_gpu = device.type == "cuda"
    size = _GPU_SIZE if is_gpu else _CPU_SIZE
    flops = {kind: rate(2.0 * size**3, once) for kind, once in _matmuls(device, size).items()}
    copied = _GPU_COPIED if is_gpu else _CPU_COPIED
    source = torch.empty(copied, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copies = rate(2.0 * copied, partial(_timed, device, partial(target.copy_, source)))
    del source, target
    ways = _ways(device, rate) if is_gpu else (0.0, 0.0, 0.0)
    write, read = _disk()
    properties = torch.cuda.get_device_properties(device) if is_gpu else None
    return DeviceFigures(
        host=host,
        device=name,
        kind=properties.name if properties else environment.processor_name(),
        memory_bytes=properties.total_memory if properties else min(available_bytes(), memory_bytes()) // sharing,
        flops_per_second=flops,
        copied=copies,
        to_device=ways[0],
        to_host=ways[1],
        both_ways=ways[2],
        disk_write=write,
        disk_read=read,
        num_cores=environment.num_cores(),
        host_bytes=memory_bytes(),
        spread=max(each.spread for each in found),
        kernels=() if is_gpu else measure_kernels(_crowd(world)),
    )


def _crowd(world: World) -> Crowd:
    if world.size == 1:
        return Crowd()
    add = partial(dist.all_reduce, group=world.guarded(dist.new_group()))
    return Crowd(meet=world.wait, gather=world.gather, add=add)


def name_device(device: torch.device, host: str, name: str) -> DeviceFigures:
    """Return the device without measurements."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else environment.processor_name()
    return DeviceFigures(host=host, device=name, kind=kind, memory_bytes=0, flops_per_second={}, copied=0.0)


def _timed(device: torch.device, run: Callable[[], object]) -> float:
    """Return the seconds of one run, by the device's own clock."""
    if device.type != "cuda":
        start = perf_counter()
        run()
        return perf_counter() - start
    begin, end = new_event(times=True), new_event(times=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _matmuls(device: torch.device, size: int) -> dict[str, Callable[[], float]]:
    """Return for each precision a function that times one matmul. On CPUs only fp32, as in plans on them."""
    kinds = ["fp32", "tf32", "fp16", "bf16"] if device.type == "cuda" else ["fp32"]
    found: dict[str, Callable[[], float]] = {}
    for kind in kinds:
        left, right = (torch.randn(size, size, device=device, dtype=_TYPES[kind]) for _ in range(2))
        made = torch.empty_like(left)
        multiply = partial(torch.mm, left, right, out=made)
        found[kind] = partial(_timed, device, partial(_multiply, multiply, precise=kind != "tf32"))
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FP8:
        halves = [torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
        one = torch.ones((), device=device)
        both = [(half, one) for half in halves]
        run = partial(scaled_mm, both[0], both[1], torch.bfloat16, None, fast=True)
        found["fp8"] = partial(_timed, device, run)
    return found


def _multiply(multiply: Callable[[], object], *, precise: bool) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if precise else "high")
    try:
        multiply()
    finally:
        torch.set_float32_matmul_precision(before)


def _ways(device: torch.device, rate: Callable[[float, Callable[[], float]], float]) -> tuple[float, float, float]:
    """Return bytes/s to the device, to the host, and per direction when both are busy, with pinned memory."""
    here, there = (torch.empty(_MOVED, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    mine, other = (torch.empty(_MOVED, dtype=torch.uint8, device=device) for _ in range(2))
    down, up = new_stream(device), new_stream(device)

    def both() -> None:
        now = torch.cuda.current_stream(device)
        for stream in (down, up):
            stream.wait_stream(now)
        with torch.cuda.stream(down):
            mine.copy_(here, non_blocking=True)
        with torch.cuda.stream(up):
            there.copy_(other, non_blocking=True)
        for stream in (down, up):
            now.wait_stream(stream)

    to_device = rate(_MOVED, partial(_timed, device, partial(mine.copy_, here, non_blocking=True)))
    to_host = rate(_MOVED, partial(_timed, device, partial(there.copy_, other, non_blocking=True)))
    return to_device, to_host, rate(_MOVED, partial(_timed, device, both))


def _disk() -> tuple[float, float]:
    """Return bytes/s written to and read from the disk of the working folder; 0 if it is not writable."""
    block = os.urandom(_BLOCK)
    with suppress(OSError), tempfile.TemporaryDirectory(prefix=".shardwise-probe-", dir=".") as folder:
        path = Path(folder) / "probe"
        start = perf_counter()
        with path.open("wb", buffering=0) as file:
            for _ in range(_DISK // _BLOCK):
                file.write(block)
            os.fsync(file.fileno())
            written = perf_counter() - start
            _forget(file.fileno())
        start = perf_counter()
        with path.open("rb", buffering=0) as file:
            while file.read(_BLOCK):
                pass
        return _DISK / written, _DISK / (perf_counter() - start)
    return 0.0, 0.0


def _forget(handle: int) -> None:
    """Ask the system to drop a file from its page cache, so that the next read comes from the disk."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
