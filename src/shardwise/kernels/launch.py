"""What all launches ask (how tensors lie, what GPU it is), and launches themselves, which can be rehearsed.

In a `Rehearsal` tensors of the meta device stand for those of a GPU: the code that launches kernels runs as it is,
nothing is computed, and what it would have launched is noted. So what a model needs is known before its weights are
there (`compile_ahead.py`), and there is no second list of it.
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
    """What launches ask of a GPU: its multiprocessors, and whether kernels may begin while those before them end."""

    num_processors: int
    overlaps: bool


@dataclass(frozen=True, slots=True)
class StandIn:
    """A tensor as a compiler sees it: its type, and whether it begins at a whole 16 bytes."""

    dtype: torch.dtype
    offset: int = 0

    def data_ptr(self) -> int:
        return self.offset


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel and what it would have been given: in the place of tensors their stand-ins."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def key(self) -> tuple[Any, ...]:
        """What Triton compiles anew for: types, sizes that are 1 or whole sixteens, and all that is constant."""
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
    """As long as it is entered, in one thread, tensors of the meta device stand for those of a GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        #: By what they are compiled for, in the order of their first launch.
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
    """Begin the programs of a kernel; in a rehearsal that is noted, and nothing begins."""
    rehearsal = _REHEARSAL.get()
    if rehearsal is None:
        kernel[grid](*arguments, **options)
    else:
        rehearsal.note(kernel, arguments, options)


def is_rehearsed(x: Tensor) -> bool:
    """Whether it stands for a tensor of a GPU."""
    return x.is_meta and _REHEARSAL.get() is not None


def is_on_gpu(x: Tensor) -> bool:
    """Or stands for one that is."""
    return x.is_cuda or is_rehearsed(x)


def rows_of(x: Tensor) -> Tensor:
    """The same numbers as [rows, columns], each row in one piece; copied only where they do not lie at equal distances.

    Two dims, so that `stride(0)` is the distance: the stride of a dim of one element says nothing (a single key head,
    turned around, is contiguous whatever its stride).
    """
    columns = x.shape[-1]
    flat = x.reshape(prod(x.shape[:-1]), columns)
    return flat if flat.stride(1) == 1 or columns == 1 else flat.contiguous()


def overlapping(device: torch.device) -> dict[str, bool]:
    """What a launch is given so that its programs may be placed while those of the kernel before it end.

    They read what no kernel writes (weights), and then wait until the kernel before is over and all that it wrote is
    seen (`gdc_wait`); each lets the next kernel's programs in as soon as it runs (`gdc_launch_dependents`). Every
    program waits before it writes anything or returns, so that the end of one kernel is the end of all before it. From
    Hopper on.
    """
    return {"OVERLAPS": True, "launch_pdl": True} if gpu_of(device).overlaps else {"OVERLAPS": False}


def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; in the interpreter a few, so that loops over them are tried."""
    return gpu_of(device).num_processors


def gpu_of(device: torch.device) -> Gpu:
    """The GPU of a device, or what stands for one: of the meta device the rehearsal's."""
    rehearsal = _REHEARSAL.get() if device.type == "meta" else None
    return _gpu(device) if rehearsal is None else rehearsal.gpu


@cache
def _gpu(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return Gpu(num_processors=2, overlaps=False)
    found = torch.cuda.get_device_properties(device)
    return Gpu(num_processors=found.multi_processor_count, overlaps=found.major >= 9)
