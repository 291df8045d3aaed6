"""Compile kernels before they are needed, with many threads.

On first launch they would compile one after another, half a second each. Nine tenths of that runs without Python's
lock: compiler passes, the assembler, and in older versions of Triton a C compiler. Before its first compilation Triton
also hashes its own sources for the keys of its disk cache, which takes a second or two even if the cache is warm. That
happens while the launches are being found.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from shardwise.kernels.choose import compiles, say_once
from shardwise.kernels.launch import Launch

_MOST_THREADS = 16


def begin_to_compile(find: Callable[[], Iterable[Launch]], device: torch.device) -> "Future[int]":
    """Find in a background thread what will be launched, and compile it for a GPU. The result is how many compiled."""
    if device == torch.device("cuda"):  # Resolve it here: another thread has its own current device.
        device = torch.device("cuda", torch.cuda.current_device())
    beside = ThreadPoolExecutor(1)
    compiled = beside.submit(_compile_all, find, device)
    beside.shutdown(wait=False)
    return compiled


def _compile_all(find: Callable[[], Iterable[Launch]], device: torch.device) -> int:
    try:
        torch.cuda.set_device(device)  # This is per thread.
        if not compiles(device):
            return 0
        return compile_all(find(), before=lambda: torch.cuda.set_device(device))
    except Exception as error:  # The first launch meets the error again, or compiles what is missing.
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        say_once(f"kernels are compiled when they are first needed, not ahead ({reason})")
        return 0


def compile_all(launches: Iterable[Launch], *, before: Callable[[], object] | None = None) -> int:
    """Compile these for the current GPU and load them. Returns how many succeeded; a launch would meet the errors of
    the others again. `before` is called in each thread."""
    from triton import AsyncCompileMode  # type: ignore[import-untyped]

    threads = min(os.cpu_count() or 1, _MOST_THREADS)
    with ThreadPoolExecutor(threads, initializer=before) as pool:
        told = _behind(launches, pool.submit(_name_triton))
        with AsyncCompileMode(pool, ignore_errors=True):
            made: list[Any] = [each.kernel.warmup(*each.arguments, grid=(1,), **each.options) for each in told]
        return sum(pool.map(_is_loaded, made))


def _name_triton() -> None:
    """Have Triton hash its sources, once. If that function has moved, its first compilation does it."""
    with suppress(ImportError):
        from triton.runtime.cache import triton_key  # type: ignore[import-untyped]

        triton_key()


def _behind(launches: Iterable[Launch], named: "Future[None]") -> Iterator[Launch]:
    """Yield the launches once that hash is known: otherwise threads would compute it twice."""
    for each in launches:
        named.result()
        yield each


def _is_loaded(kernel: Any) -> bool:
    """Whether a kernel compiled; loading it also makes its launcher."""
    try:
        return (kernel.result() if hasattr(kernel, "result") else kernel).run is not None
    except Exception:
        return False
