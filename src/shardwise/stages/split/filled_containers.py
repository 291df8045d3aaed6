"""Containers that a unit is given and writes into: `kept.append(h)`, `cache[i] = h`, `cache.seen += 1`.

What is in them afterwards counts as returned, so stages hand it on like everything else that a unit returns:

    layers.1(h, kept)      returns h1, and leaves kept = [h0, h1]
    what is handed on      h1, ([h0, h1],)
    another stage          sets kept[:] = [h0, h1], and gives h1 to the glue

The outermost containers among the arguments are looked at, with all that is inside of them: lists, dictionaries, sets
of plain values, and objects of the user's own, of which the attributes are. Objects inside of others are not opened:
their units stay on one stage, or are refused.
"""

from argparse import Namespace
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.stages.split.outline import PLAIN, Outline
from shardwise.stages.split.theirs import is_theirs
from shardwise.torch_private import pytree

_KINDS = (list, dict, OrderedDict, defaultdict, deque)
_SPACES = (SimpleNamespace, Namespace)


class _Attributes:
    """An object of the user's own among arguments, in the form in which torch's pytree looks into it."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner


def _open(held: _Attributes) -> tuple[list[Any], tuple[type, tuple[str, ...]]]:
    attributes = vars(held.owner)
    return list(attributes.values()), (type(held.owner), tuple(attributes))


def _closed(values: Any, of: tuple[type, tuple[str, ...]]) -> Any:
    """Return another object of the class, with these attributes: not its maker's."""
    kind, names = of
    made = SimpleNamespace() if kind is SimpleNamespace else object.__new__(kind)
    vars(made).update(zip(names, values, strict=True))
    return made


pytree.register_pytree_node(_Attributes, _open, _closed)


def opened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of which pytree opens objects of the user's own too, as it opens lists."""
    return tuple(map(_opened, args)), {name: _opened(each) for name, each in kwargs.items()}


def _opened(each: Any) -> Any:
    if type(each) is tuple:
        return tuple(map(_opened, each))
    return _Attributes(each) if _has_attributes(each) else each


def containers_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the outermost containers among arguments, in their order; of an object its dictionary of attributes."""
    found: dict[int, Any] = {}
    waiting = [*args, *kwargs.values()]
    while waiting:
        each = waiting.pop(0)
        if type(each) in _KINDS or type(each) is set:
            found[id(each)] = each
        elif type(each) is tuple:
            waiting[:0] = each
        elif _has_attributes(each):
            found[id(each)] = vars(each)
    return list(found.values())


def _has_attributes(each: Any) -> bool:
    """Whether it is a plain object of the user's own. Modules and tensors are followed otherwise."""
    kind: Any = type(each)
    if kind in PLAIN or kind in _KINDS or isinstance(each, (Tensor, nn.Module)) or not hasattr(each, "__dict__"):
        return False
    return kind in _SPACES or (kind.__new__ is object.__new__ and is_theirs(kind))


def _content(container: Any) -> Any:
    """Return what is handed on of a container: of a set of plain values their list, in an order that all ranks have."""
    if type(container) is set and all(isinstance(each, PLAIN) for each in container):
        return sorted(container, key=repr)
    return container


class Filling:
    """A call of a unit that returns also what it leaves in containers; `filled` are those, by number."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self._inner = inner
        self.filled: tuple[int, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        held = containers_in(args, kwargs)
        before = [pytree.tree_flatten(_content(each)) for each in held]
        returned = self._inner(*args, **kwargs)
        after = [pytree.tree_flatten(_content(each)) for each in held]
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
    return (returned, tuple(_content(held[number]) for number in filled)) if filled else returned


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
    if type(container) is set:
        container.clear()
        container.update(content)
    elif isinstance(container, dict):
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
