"""What functions remember by `lru_cache` or `cache`: masks, tables of positions, random projections.

Trials fill such a memory with what they have made: on three rows, in other precisions, with nothing drawn at random. So
what they have put there is taken out when all of them are over. Until then it stays: a table that one block has made
and others find there is none that would have to be sent between stages, as each process makes its own.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shardwise.stages.split.python_state import PythonState


def remembering(*roots: Any) -> list[Any]:
    """The functions with a memory that can be reached from a module, or from a loss."""
    return PythonState(*roots).remembering


def num_remembered(functions: Sequence[Any]) -> int:
    """How often they had to compute something."""
    return sum(each.cache_info().misses for each in functions)


@contextmanager
def forgotten(*roots: Any) -> Iterator[None]:
    """What is remembered within it is forgotten at its end."""
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
    """What a memory without bounds has. That of one with bounds is a ring, of which nothing can be taken out by itself:
    what it had before is kept, with what trials have put there."""
    if function.cache_parameters()["maxsize"] is not None:
        return {}
    held = [each for each in gc.get_referents(function) if isinstance(each, dict) and each is not vars(function)]
    return next((each for each in held if len(each) == function.cache_info().currsize), {})
