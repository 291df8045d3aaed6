"""What all launches need (layout of tensors, properties of the GPU), and launches, which can be rehearsed.

In a `Rehearsal` tensors on the meta device stand for those of a GPU: the code that launches kernels runs unchanged,
nothing is computed, and the launches are recorded. So the kernels that a model needs are known before its weights are
loaded (`compile_ahead.py`), without a second list of them.
"""

from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What launches need to know of a GPU: its multiprocessors, and whether kernels may overlap their predecessors."""

    num_processors: int
    overlaps: bool


@dataclass(frozen=True, slots=True)
class StandIn:
    """A tensor as the compiler sees it: its dtype, and whether it is aligned to 16 bytes."""

    dtype: torch.dtype
    offset: int = 0

    def data_ptr(self) -> int:
        return self.offset


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel and its arguments, with stand-ins for tensors."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def key(self) -> tuple[Any, ...]:
        """Return what Triton specialises on: dtypes, integers that are 1 or multiples of 16, and all constants."""
        told = getattr(self.kernel, "kwargs", None) or vars(self.kernel)
        any_size, any_place = (told.get(name) or () for name in ("do_not_specialize", "do_not_specialize_on_alignment"))
        kinds: list[Any] = []
        for name, each in zip(self.kernel.arg_names, self.arguments, strict=False):
            if isinstance(each, StandIn):
                kinds.append((each.dtype, each.offset != 0 and name not in any_place))
            elif type(each) is int:
                is_long = not -(2**31) <= each < 2**31
                kinds.append((is_long,) if name in any_size else (is_long, each == 1, each % 16 == 0))
            else:
                kinds.append(None if each is None else type(each))
        name = f"{self.kernel.fn.__module__}.{self.kernel.fn.__name__}"
        return name, tuple(kinds), tuple(sorted(self.options.items()))


class Rehearsal:
    """While it is entered, in one thread, tensors on the meta device stand for those of a GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        #: By specialisation, in the order of the first launch.
        self.launches: dict[tuple[Any, ...], Launch] = {}

    def __enter__(self) -> "Rehearsal":
        self._before: Token[Rehearsal | None] = _REHEARSAL.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _REHEARSAL.reset(self._before)

    def note(self, kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        given = tuple(
            StandIn(each.dtype, int(each.storage_offset()) * each.element_size() % 16)
            if isinstance(each, Tensor)
            else each
            for each in arguments
        )
        made = Launch(kernel, given, options)
        self.launches.setdefault(made.key(), made)


_REHEARSAL: ContextVar[Rehearsal | None] = ContextVar("rehearsal", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel; in a rehearsal, record the launch instead."""
    rehearsal = _REHEARSAL.get()
    if rehearsal is None:
        kernel[grid](*arguments, **options)
    else:
        rehearsal.note(kernel, arguments, options)


def is_rehearsed(x: Tensor) -> bool:
    """Whether it stands for a tensor on a GPU."""
    return x.is_meta and _REHEARSAL.get() is not None


def is_on_gpu(x: Tensor) -> bool:
    """Whether it is on a GPU, or stands for a tensor that is."""
    return x.is_cuda or is_rehearsed(x)


def rows_of(x: Tensor) -> Tensor:
    """Return the same numbers as [rows, columns], each row contiguous; copied only if rows are not equally spaced.

    It has two dims so that `stride(0)` is the spacing: the stride of a dim with one element is meaningless (a single
    key head, transposed, is contiguous whatever its stride).
    """
    columns = x.shape[-1]
    flat = x.reshape(prod(x.shape[:-1]), columns)
    return flat if flat.stride(1) == 1 or columns == 1 else flat.contiguous()


def overlapping(device: torch.device) -> dict[str, bool]:
    """Return launch options with which a kernel's programs may start while the previous kernel ends.

    Programs first read only what no kernel writes (weights). Then they wait until the previous kernel is over and its
    writes are visible (`gdc_wait`). Each lets the next kernel's programs start as soon as it runs itself
    (`gdc_launch_dependents`). Every program waits before it writes anything or returns, so that the end of one kernel
    implies the end of all before it. This is programmatic dependent launch, from Hopper on.
    """
    return {"OVERLAPS": True, "launch_pdl": True} if gpu_of(device).overlaps else {"OVERLAPS": False}


def num_processors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; in the interpreter a few, so that loops over them are tested."""
    return gpu_of(device).num_processors


def gpu_of(device: torch.device) -> Gpu:
    """Return the GPU of a device; for the meta device, the one that is rehearsed."""
    rehearsal = _REHEARSAL.get() if device.type == "meta" else None
    return _gpu(device) if rehearsal is None else rehearsal.gpu


@cache
def _gpu(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return Gpu(num_processors=2, overlaps=False)
    found = torch.cuda.get_device_properties(device)
    return Gpu(num_processors=found.multi_processor_count, overlaps=found.major >= 9)
