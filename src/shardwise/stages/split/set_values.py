"""Values that a script may set between steps: read, compared by kind, and set again for a trial.

`script_values.py` finds where they are.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.stages.split.drawn_state import PLAIN, SlotValues, slots_of
from shardwise.stages.split.theirs import SPACES, is_own
from shardwise.torch_private import version_of

#: Counters of forwards are tried with this value.
FAR = 100_000
#: A tuple, list or array with more values than this counts as data.
MOST_INSIDE = 16
#: This many integer values of one name are kinds of their own; later ones are grouped by powers of two.
_MOST_NUMBERS = 8
_CALLED = (FunctionType, BuiltinFunctionType, MethodType, partial, nn.Module)
#: Compared by what they are.
_COMPARED = (*_CALLED, Enum)


class Number:
    """A snapshot of a tensor with one element; its version tells whether it was written to since."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version, self.was = tensor, _version(tensor), tensor.detach().clone()

    def is_still(self, tensor: Any) -> bool:
        return tensor is self.tensor and _version(tensor) == self.version

    def __repr__(self) -> str:
        return f"{self.was.item():g}"


class Record:
    """An object that holds plain values, such as a configuration, which a script may replace by another.

    What is set in the same object is seen there. So values are read only to compare two objects."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    @property
    def values(self) -> dict[str, Any]:
        held = getattr(self.owner, "__dict__", None)
        if held is None:
            held = SlotValues(self.owner).read() if slots_of(self.owner) is not None else {}
        return {key: each for key, each in held.items() if type(each) in PLAIN}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record):
            return False
        return self.owner is other.owner or (type(self.owner) is type(other.owner) and self.values == other.values)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self.owner).__name__}({', '.join(f'{key}={each!r}' for key, each in self.values.items())})"


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else version_of(tensor)


class ValueKinds:
    """The kind of each value that was ever set: of its first value, and of its current one if that differs.

    Values of one kind are tried once, as a rate may change in every step.
    """

    def __init__(self) -> None:
        self._first: dict[str, Hashable] = {}
        self._others: dict[str, Hashable] = {}
        self._seen: dict[str, set[int]] = {}

    def note(self, name: str, was: Any, now: Any) -> None:
        """Record that a value was set."""
        first = self._first.setdefault(name, self._kind(name, was))
        kind = self._kind(name, now)
        self._others.pop(name, None)
        if kind != first:
            self._others[name] = kind

    @property
    def now(self) -> Hashable:
        """Equal if all values have the same kinds."""
        return frozenset(self._others.items())

    @property
    def are_others(self) -> bool:
        """Whether any value has another kind than at first."""
        return bool(self._others)

    def _kind(self, name: str, value: Any) -> Hashable:
        """Return the value itself, or its sign and power of two for floats and for integers with many values."""
        kind: Any = value.was.item() if isinstance(value, Number) else value
        if isinstance(kind, Record):
            return type(kind.owner).__name__, self._kind(name, kind.values)
        if isinstance(kind, (set, frozenset)):
            return repr(sorted(map(repr, kind)))
        if isinstance(kind, (tuple, list, dict)):
            inside = kind.items() if isinstance(kind, dict) else enumerate(kind)
            return tuple((str(key), self._kind(f"{name}.{key}", each)) for key, each in inside)
        if type(kind) not in (int, float) or kind in (0, 1):
            return kind  # type: ignore[no-any-return]
        if not math.isfinite(kind):
            return repr(kind)
        size = math.frexp(kind)[1]
        if type(kind) is float:
            return "a number", kind < 0, size
        seen = self._seen.setdefault(name, set())
        if len(seen) < _MOST_NUMBERS:
            seen.add(kind)
        return kind if kind in seen else ("a number", kind < 0, size)


def is_value(value: Any) -> bool:
    """Whether this is compared by what it is: a plain value, a function, a module, or a few plain values."""
    return type(value) in PLAIN or isinstance(value, _COMPARED) or _is_configuration(value)


def _is_configuration(value: Any) -> bool:
    """Whether this is a small collection of plain values that a script may replace: `weights = (1.0, 0.5)`."""
    if isinstance(value, dict):
        return len(value) <= MOST_INSIDE and all(type(each) in PLAIN for each in value.values())
    is_row = isinstance(value, (tuple, list, frozenset)) and len(value) <= MOST_INSIDE
    return is_row and all(type(each) in PLAIN for each in value)


class Values:
    """The values of one holder, by name."""

    def __init__(
        self, read: Callable[[], Mapping[str, Any]], write: Callable[[str, Any], None],
        drop: Callable[[str], Any] = lambda _: None,
    ) -> None:  # fmt: skip
        #: Removes the value of a name.
        self.drop = drop
        self._read, self._write = read, write
        self._numbers: dict[str, Number] = {}

    def read(self) -> dict[str, Any]:
        """Return the values that can be compared: plain ones, functions, modules, configurations, and tensors with one
        element."""
        found = {}
        for key, value in self._read().items():
            if is_value(value):
                found[key] = value
            elif isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad and not value.is_meta:
                known = self._numbers.get(key)
                if known is None or not known.is_still(value):
                    known = self._numbers[key] = Number(value)
                found[key] = known
            elif not isinstance(value, type) and (isinstance(value, SPACES) or is_own(type(value))):
                found[key] = Record(value)
        return found

    def put(self, key: str, value: Any) -> None:
        """Set a value. Writing to a tensor this way leaves its version counter unchanged."""
        if isinstance(value, Number):
            value.tensor.data.copy_(value.was)
            value = value.tensor
        self._write(key, value.owner if isinstance(value, Record) else value)


class Holder(NamedTuple):
    """An object that holds values, with its name. `module` is its path below the root if it is a module there."""

    name: str
    values: Values
    module: str | None = None


class Counted:
    """Integers that forwards count up: each is tried once with a much larger number."""

    def __init__(self, holders: Sequence[Holder]) -> None:
        self._holders = holders
        #: The first value, by holder and key.
        self._first: dict[tuple[int, str], Any] = {}
        self._known: set[tuple[int, str]] = set()

    def note(self, before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> None:
        """Record the values of all holders before and after a step."""
        for number, (was, values) in enumerate(zip(before, now, strict=True)):
            if values != was:
                counted = [key for key, each in values.items() if _is_counted(was.get(key), each)]
                self._first.update({(number, key): was[key] for key in counted if (number, key) not in self._first})

    @property
    def is_due(self) -> bool:
        """Whether a counter has not been tried yet."""
        return bool(self._first.keys() - self._known)

    def take(self) -> list[tuple[int, str, Any, Any]]:
        """Return the counters not tried yet: holder, key, first value and the value to try. Mark them as tried."""
        found = [(*each, was, _far_of(was)) for each, was in self._first.items() if each not in self._known]
        self._known |= self._first.keys()
        return found

    @contextmanager
    def put(self, found: Sequence[tuple[int, str, Any, Any]]) -> Iterator[None]:
        """Set these values within the context."""
        kept = [(self._holders[holder].values, key, self._holders[holder].values.read()) for holder, key, _, _ in found]
        for holder, key, _, far in found:
            self._holders[holder].values.put(key, far)
        try:
            yield
        finally:
            for values, key, was in kept:
                values.put(key, was[key])


def _is_counted(was: Any, now: Any) -> bool:
    """Whether this is an integer that has increased."""
    if isinstance(was, Number) and isinstance(now, Number):
        return not was.was.is_floating_point() and bool((now.was > was.was).all())
    return type(was) is int and type(now) is int and now > was


def _far_of(was: Any) -> Any:
    if not isinstance(was, Number):
        return FAR
    far = copy(was)
    kind = was.was.dtype
    far.was = torch.full_like(was.was, True if kind == torch.bool else min(FAR, torch.iinfo(kind).max))
    return far
