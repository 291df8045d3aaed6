"""Kernels that are compiled before anybody waits for them, by many threads at once.

Whoever launches first would wait for one after the other, half a second each. Nine tenths of that is not under Python's
lock: passes over the code, the assembler, and in older versions of Triton a C compiler. Before the first Triton also
reads all of itself to name what it keeps on disk: a second or two, whatever is kept there. That is done while what will
be launched is found out.
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
    """In a thread beside this one: find what will be launched, and compile it for a GPU. How many were."""
    if device == torch.device("cuda"):  # Whichever is current here: another thread has its own.
        device = torch.device("cuda", torch.cuda.current_device())
    beside = ThreadPoolExecutor(1)
    compiled = beside.submit(_compile_all, find, device)
    beside.shutdown(wait=False)
    return compiled


def _compile_all(find: Callable[[], Iterable[Launch]], device: torch.device) -> int:
    try:
        torch.cuda.set_device(device)  # Of a thread.
        if not compiles(device):
            return 0
        return compile_all(find(), before=lambda: torch.cuda.set_device(device))
    except Exception as error:  # Whatever it is, the first launch meets it again, or compiles what is missing.
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        say_once(f"kernels are compiled when they are first needed, not ahead ({reason})")
        return 0


def compile_all(launches: Iterable[Launch], *, before: Callable[[], object] | None = None) -> int:
    """Compile these for the current GPU, and load them there; how many there was nothing wrong with, which a launch
    would meet again. `before` is called in each thread."""
    from triton import AsyncCompileMode  # type: ignore[import-untyped]

    threads = min(os.cpu_count() or 1, _MOST_THREADS)
    with ThreadPoolExecutor(threads, initializer=before) as pool:
        told = _behind(launches, pool.submit(_name_triton))
        with AsyncCompileMode(pool, ignore_errors=True):
            made: list[Any] = [each.kernel.warmup(*each.arguments, grid=(1,), **each.options) for each in told]
        return sum(pool.map(_is_loaded, made))


def _name_triton() -> None:
    """Have Triton read all of itself, once. Where it keeps that elsewhere, its first kernel does it."""
    with suppress(ImportError):
        from triton.runtime.cache import triton_key  # type: ignore[import-untyped]

        triton_key()


def _behind(launches: Iterable[Launch], named: "Future[None]") -> Iterator[Launch]:
    """The same, from the first on behind that: else it would be done twice."""
    for each in launches:
        named.result()
        yield each


def _is_loaded(kernel: Any) -> bool:
    """Loading a program makes what launches it, too."""
    try:
        return (kernel.result() if hasattr(kernel, "result") else kernel).run is not None
    except Exception:
        return False
