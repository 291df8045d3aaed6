"""The entries of functions under `lru_cache` or `cache`: masks, position tables, random projections.

Trials add entries that training must not use: made for three rows, in other precisions, without random draws. So they
are removed after all trials. Until then they stay: a table that one block makes and other blocks find in the cache must
not look like a value to send between stages, as each process makes its own.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shardwise.stages.split.python_state import PythonState


def remembering(*roots: Any) -> list[Any]:
    """Return the cached functions that can be reached from a module or a loss."""
    return PythonState(*roots).remembering


def num_remembered(functions: Sequence[Any]) -> int:
    """Return the number of cache misses."""
    return sum(each.cache_info().misses for each in functions)


@contextmanager
def forgotten(*roots: Any) -> Iterator[None]:
    """Remove at exit the entries that were added."""
    before = [(each, each.cache_info().currsize, list(_entries(each))) for each in remembering(*roots)]
    try:
        yield
    finally:
        for each, size, keys in before:
            if not size and each.cache_info().currsize:
                each.cache_clear()
            entries = _entries(each)
            for key in [key for key in entries if key not in keys]:
                del entries[key]


def _entries(function: Any) -> dict[Any, Any]:
    """Return the entries of an unbounded cache. A bounded one is a linked list from which no single entry can be
    removed: if it had entries before, those of trials stay in it too."""
    if function.cache_parameters()["maxsize"] is not None:
        return {}
    held = [each for each in gc.get_referents(function) if isinstance(each, dict) and each is not vars(function)]
    return next((each for each in held if len(each) == function.cache_info().currsize), {})
