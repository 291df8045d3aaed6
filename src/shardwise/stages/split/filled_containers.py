"""Lists and dictionaries that a unit is given and writes into: `kept.append(h)`, `cache[i] = h`.

What is in them afterwards counts as returned, so stages hand it on like everything else that a unit returns:

    layers.1(h, kept)      returns h1, and leaves kept = [h0, h1]
    what is handed on      h1, ([h0, h1],)
    another stage          sets kept[:] = [h0, h1], and gives h1 to the glue

The outermost containers among the arguments are looked at, with all that is inside of them. Those in objects of the
user's own are not: their units stay on one stage, or are refused.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.stages.split.outline import PLAIN, Outline
from shardwise.torch_private import pytree

_KINDS = (list, dict, OrderedDict, defaultdict, deque)


def containers_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the outermost lists and dictionaries among arguments, in their order."""
    found: dict[int, Any] = {}
    waiting = [*args, *kwargs.values()]
    while waiting:
        each = waiting.pop(0)
        if type(each) in _KINDS:
            found[id(each)] = each
        elif isinstance(each, tuple):
            waiting[:0] = each
    return list(found.values())


class Filling:
    """A call of a unit that returns also what it leaves in containers; `filled` are those, by number."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self._inner = inner
        self.filled: tuple[int, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        held = containers_in(args, kwargs)
        before = [pytree.tree_flatten(each) for each in held]
        returned = self._inner(*args, **kwargs)
        after = [pytree.tree_flatten(each) for each in held]
        self.filled = tuple(n for n, pair in enumerate(zip(before, after, strict=True)) if not _are_same(*pair))
        return joined(returned, held, self.filled)


def filling(inner: Callable[..., Any], filled: Sequence[int]) -> Callable[..., Any]:
    """Return the same for containers that are known."""
    if not filled:
        return inner

    def call(*args: Any, **kwargs: Any) -> Any:
        held = containers_in(args, kwargs)
        return joined(inner(*args, **kwargs), held, filled)

    return call


def joined(returned: Any, held: Sequence[Any], filled: Sequence[int]) -> Any:
    """Return what was returned, with what is in the containers now."""
    return (returned, tuple(held[number] for number in filled)) if filled else returned


def taken_apart(both: Any, held: Sequence[Any], filled: Sequence[int]) -> Any:
    """Return what was returned, and put the rest into the containers."""
    if not filled:
        return both
    returned, contents = both
    for number, content in zip(filled, contents, strict=True):
        _fill(held[number], content)
    return returned


def check_filled(name: str, leaves: Sequence[Any], outline: Outline) -> None:
    """Raise if a call leaves more or less than on the example: what it leaves is known by its place."""
    if len(leaves) != len(outline.leaves):
        raise ShardwiseError(
            f"{name} returns, and leaves in the lists and dictionaries that it is given, {len(leaves)} values, and for"
            f" the example {len(outline.leaves)}: other stages would take one for another",
            remedy="the same entries in every step; or a plan without pp",
        )


def _fill(container: Any, content: Any) -> None:
    """Give a container the content of another, in place: glue may have it elsewhere, and those inside of it too."""
    if container is content:
        return
    if isinstance(container, dict):
        merged = {key: _merged(container.get(key), each) for key, each in content.items()}
        container.clear()
        container.update(merged)
    else:
        entries = list(content)
        container.clear()
        container.extend(entries)


def _merged(old: Any, new: Any) -> Any:
    if type(old) not in _KINDS or type(old) is not type(new):
        return new
    _fill(old, new)
    return old


def _are_same(one: tuple[list[Any], pytree.TreeSpec], other: tuple[list[Any], pytree.TreeSpec]) -> bool:
    return one[1] == other[1] and all(map(_is_same, one[0], other[0]))


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in PLAIN and one == other)
