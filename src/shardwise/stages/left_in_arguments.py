"""Tensors that a unit leaves in containers among its arguments, in addition to or instead of its return value.

`cache[i] = h`, `state.kept.append(h)`, `state.h = h`: dictionaries, lists, and objects of the user's own that are
passed from block to block. Caches of transformers are such objects too.
"""

from collections.abc import Iterator
from copy import copy
from typing import Any

from torch import Tensor, nn

from shardwise.stages.split.theirs import is_theirs

_CACHES = "transformers.cache_utils"
#: Containers are searched to this depth.
_DEPTH = 4


def _inside(held: Any) -> list[Any] | None:
    """Return the contents of a container; None if it is not one."""
    if isinstance(held, dict):
        return list(held.values())
    if isinstance(held, (list, tuple)):
        return list(held)
    is_open = is_theirs(type(held)) or type(held).__module__ == _CACHES
    if is_open and not isinstance(held, (Tensor, nn.Module, type)) and hasattr(held, "__dict__"):
        return list(vars(held).values())
    return None


def tensors_left(arguments: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """Yield the tensors in containers among arguments, nested ones included."""
    for each in _inside(arguments) or ():
        if isinstance(each, Tensor):
            if depth < _DEPTH:  # Else it is an argument itself.
                yield each
        elif depth:
            yield from tensors_left(each, depth - 1)


def has_containers(arguments: Any) -> bool:
    """Whether any argument is a container that can be written to."""
    return any(not isinstance(each, tuple) and _inside(each) is not None for each in _inside(arguments) or ())


def with_own_containers(held: Any, depth: int = _DEPTH) -> Any:
    """Copy containers but not the tensors in them, so that later changes to the originals do not show."""
    if _inside(held) is None or not depth:
        return held
    if isinstance(held, dict):
        made = copy(held)
        for key, each in held.items():
            made[key] = with_own_containers(each, depth - 1)
        return made
    if type(held) is list or type(held) is tuple:
        return type(held)(with_own_containers(each, depth - 1) for each in held)
    if isinstance(held, (list, tuple)):
        return copy(held)
    made = copy(held)
    for key, each in vars(held).items():
        vars(made)[key] = with_own_containers(each, depth - 1)
    return made
