"""Find the values that a script may set between steps and that a forward or a loss can read.

They are attributes of the user's modules and criterions, entries of dictionaries and lists, closures, and variables of
files and classes: `criterion.hard = True`, `weight["contrast"] = 0.5`, `MODE = "max"`, `block.act = nn.Softmax(-1)`,
`weight.fill_(0.5)`. The search runs once. After it, reading all values means reading a few dictionaries.
"""

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.stages.split.drawn_state import PLAIN, SlotValues, is_array, names_in, slots_of
from shardwise.stages.split.theirs import SPACES, files_named, is_own, is_theirs
from shardwise.torch_private import buffer_slots, submodules, version_of

#: The search ends after this many objects beyond the modules: what a loss reads is within reach of them.
_MOST = 2_000
#: Counters of forwards are tried with this value.
FAR = 100_000
#: A tuple, list or array with more values than this counts as data.
_MOST_INSIDE = 16
#: This many integer values of one name are kinds of their own; later ones are grouped by powers of two.
_MOST_NUMBERS = 8
#: Attributes that every module has: torch's own, and `training`, which trials set both ways. A replaced `forward` is
#: handled elsewhere, and engines replace some themselves.
_OF_TORCH = frozenset({*vars(nn.Module()), "forward"})
_CALLED = (FunctionType, BuiltinFunctionType, MethodType, partial, nn.Module)
_Next = Iterable[tuple[str, Any]]


class Number:
    """A snapshot of a tensor with one element; its version tells whether it was written to since."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version, self.was = tensor, _version(tensor), tensor.detach().clone()

    def is_still(self, tensor: Any) -> bool:
        return tensor is self.tensor and _version(tensor) == self.version

    def __repr__(self) -> str:
        return f"{self.was.item():g}"


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
        if isinstance(kind, (tuple, list, dict)):
            return repr(kind)
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


def _is_configuration(value: Any) -> bool:
    """Whether this is a small collection of plain values that a script may replace: `weights = (1.0, 0.5)`."""
    if isinstance(value, dict):
        return len(value) <= _MOST_INSIDE and all(type(each) in PLAIN for each in value.values())
    is_row = isinstance(value, (tuple, list)) and len(value) <= _MOST_INSIDE
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
        """Return the values that can be compared: plain ones, functions, modules, and tensors with one element."""
        found = {}
        for key, value in self._read().items():
            if type(value) in PLAIN or isinstance(value, _CALLED) or _is_configuration(value):
                found[key] = value
            elif isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad and not value.is_meta:
                known = self._numbers.get(key)
                if known is None or not known.is_still(value):
                    known = self._numbers[key] = Number(value)
                found[key] = known
        return found

    def put(self, key: str, value: Any) -> None:
        """Set a value. Writing to a tensor this way leaves its version counter unchanged."""
        if isinstance(value, Number):
            value.tensor.data.copy_(value.was)
            value = value.tensor
        self._write(key, value)


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


def find_holders(module: nn.Module, loss: Any) -> list[Holder]:
    """Return everything that a script can set on a module and its loss."""
    found: list[Holder] = []
    seen: set[int] = set()
    waiting: deque[tuple[str, Any]] = deque()
    for name, each in module.named_modules():
        seen.add(id(each))
        kind = type(each)
        found += _of_children(name, each)
        if is_theirs(kind):
            found.append(Holder(name, _of_dictionary(vars(each), _OF_TORCH), name))
            buffers = buffer_slots(each)
            found += [Holder(name, _of_dictionary(buffers), name)] if buffers else []
            waiting.extend((f"{name}.{key}".strip("."), held) for key, held in shared_by(each))
            if id(kind) not in seen:
                seen.add(id(kind))
                found += [Holder(base.__name__, _of_class(base)) for base in kind.__mro__ if is_theirs(base)]
                waiting.append((kind.__name__, getattr(kind, "forward", None)))
    waiting.append(("", loss))
    most = len(seen) + _MOST
    files: dict[int, _File] = {}
    while waiting and len(seen) < most:
        name, each = waiting.popleft()
        if type(each) in PLAIN or id(each) in seen:
            continue
        if isinstance(each, _File) and (known := files.setdefault(id(each.values), each)) is not each:
            known.names += [key for key in each.names if key not in known.names]
            continue
        seen.add(id(each))
        holder = _holder_of(name, each)
        found += [] if holder is None else [holder]
        waiting.extend(_held_by(name, each))
    return found


def shared_by(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the objects held by a module that contain only plain values, such as a configuration."""
    found = []
    for key, held in vars(module).items():
        if key not in _OF_TORCH and type(held) not in PLAIN:
            inside = held.values() if type(held) is dict else held if type(held) is list else None
            if inside is None and is_theirs(type(held)) and not isinstance(held, (nn.Module, type)):
                inside = getattr(held, "__dict__", {}).values()
            if inside and all(type(each) in PLAIN for each in inside):
                found.append((key, held))
    return found


def _of_children(name: str, module: nn.Module) -> list[Holder]:
    """Return submodules without parameters, such as activations, which a script may replace."""
    held = submodules(module)
    keys = [key for key, child in held.items() if child is not None and next(child.parameters(), None) is None]
    return [Holder(name, Values(lambda: {key: held.get(key) for key in keys}, held.__setitem__), name)] if keys else []


def _of_class(kind: type) -> Values:
    def read() -> Mapping[str, Any]:
        return {key: value for key, value in vars(kind).items() if type(value) in PLAIN and not key.startswith("__")}

    return Values(read, lambda key, value: setattr(kind, key, value))


def _of_dictionary(held: dict[Any, Any], without: frozenset[str] = frozenset()) -> Values:
    def read() -> Mapping[str, Any]:
        return {key: value for key, value in held.items() if type(key) is str and key not in without}

    return Values(read, held.__setitem__, held.pop)


def _of_list(held: list[Any]) -> Values:
    def write(key: str, value: Any) -> None:
        held[int(key)] = value

    return Values(lambda: {str(key): value for key, value in enumerate(held)}, write)


def _of_slots(owner: Any) -> Values:
    slots = SlotValues(owner)
    return Values(slots.read, lambda key, value: object.__setattr__(owner, key, value))


def _of_array(array: Any) -> Values:
    def write(key: str, value: Any) -> None:
        array.flat[int(key)] = value

    return Values(lambda: {str(key): value for key, value in enumerate(array.flatten().tolist())}, write)


def _of_cell(name: str, cell: CellType) -> Values:
    def read() -> dict[str, Any]:
        return {name: cell.cell_contents} if _is_full(cell) else {}

    def write(_: str, value: Any) -> None:
        cell.cell_contents = value

    return Values(read, write)


@dataclass(slots=True)
class _File:
    """The variables of a file that functions name."""

    name: str
    values: dict[str, Any]
    names: list[str]


def _of_file(file: _File) -> Values:
    held = file.values
    return Values(lambda: {key: held[key] for key in file.names if key in held}, held.__setitem__)


def names_in_classes(module: nn.Module, name: str) -> bool:
    """Whether a user's forward, of a module or a submodule, uses a name, directly or in a method that it names."""
    return any(name in _named_by_forward(kind) for kind in {type(each) for each in module.modules()})


def asks_for_mode(module: nn.Module) -> bool:
    """Whether a user's forward checks for training or grad mode: it may compute something else in evaluation."""
    return any(names_in_classes(module, name) for name in ("training", "is_grad_enabled", "is_inference_mode_enabled"))


def _named_by_forward(kind: type) -> set[str]:
    own = [base for base in kind.__mro__ if is_theirs(base)]
    found: set[str] = set()
    waiting = {"forward", "__call__"}
    while waiting - found:
        key = (waiting - found).pop()
        found.add(key)
        methods = [vars(base)[key] for base in own if isinstance(vars(base).get(key), FunctionType)]
        waiting |= {each for method in methods for each in names_in(method.__code__)}
    return found


def _is_full(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _holder_of(name: str, each: Any) -> Holder | None:
    if isinstance(each, nn.Module):
        return Holder(name, _of_dictionary(vars(each), _OF_TORCH))
    if isinstance(each, CellType):
        return Holder("", _of_cell(name, each))
    if type(each) is dict:
        return Holder(name, _of_dictionary(each))
    if type(each) is list:
        return Holder(name, _of_list(each))
    if isinstance(each, _File):
        return Holder(each.name, _of_file(each))
    if isinstance(each, FunctionType):
        return Holder(each.__name__, _of_dictionary(vars(each))) if is_theirs(each) else None
    if is_array(type(each)):
        return Holder(name, _of_array(each)) if each.size <= _MOST_INSIDE and each.dtype.kind in "biuf" else None
    if is_theirs(type(each)) and not isinstance(each, type) and not hasattr(each, "__dict__"):
        return Holder(name, _of_slots(each)) if slots_of(each) is not None else None
    if isinstance(each, type):
        return Holder(each.__name__, _of_class(each)) if is_theirs(each) else None
    return Holder(name, _of_dictionary(vars(each))) if _is_own(each) else None


def _is_own(each: Any) -> bool:
    """Whether this is a user's object with attributes."""
    is_own = isinstance(each, SPACES) or (is_theirs(type(each)) and not isinstance(each, type))
    return is_own and hasattr(each, "__dict__")


def _held_by(name: str, each: Any) -> _Next:
    """Return what to visit next."""
    if isinstance(each, CellType):
        return ((name, each.cell_contents),) if _is_full(each) else ()
    if isinstance(each, FunctionType):
        return _held_by_function(each) if is_theirs(each) else ()
    if isinstance(each, MethodType):
        return (name, each.__self__), (name, each.__func__)
    if isinstance(each, partial):
        return (name, each.func), (name, each.args), (name, each.keywords)
    if isinstance(each, nn.Module):
        inside = [(f"{name}.{key}".strip("."), child) for key, child in each.named_children()]
        return [*inside, *([(name, type(each).forward)] if is_theirs(type(each)) else [])]
    if isinstance(each, dict):
        return [(f"{name}[{key!r}]", value) for key, value in each.items()]
    if isinstance(each, (list, tuple)):
        return [(f"{name}[{key}]", value) for key, value in enumerate(each)]
    if _is_own(each):
        own = [(f"{name}.{key}".strip("."), value) for key, value in vars(each).items()]
        return [*own, (name, getattr(type(each), "__call__", None))]  # noqa: B004 - the function is needed
    return ()


def _held_by_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield key, cell
    names = sorted(set(names_in(function.__code__)))
    for name, file in files_named(function.__globals__, names):
        yield name, _File(name, file, names)
        for key in names:
            held = file.get(key)
            is_followed = isinstance(held, (FunctionType, partial, nn.Module, dict, list, *SPACES))
            if is_followed or is_array(type(held)) or is_theirs(type(held)):
                yield f"{name}.{key}".strip("."), held
            elif isinstance(held, type) and is_own(held):
                yield key, held
