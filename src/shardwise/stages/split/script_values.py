"""Find the values that a script may set between steps and that a forward or a loss can read.

They are attributes of the user's modules and criterions, entries of dictionaries and lists, closures, and variables of
files and classes: `criterion.hard = True`, `weight["contrast"] = 0.5`, `MODE = "max"`, `block.act = nn.Softmax(-1)`,
`weight.fill_(0.5)`. The search runs once. After it, reading all values means reading a few dictionaries.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.stages.split.drawn_state import PLAIN, SlotValues, is_array, names_in, slots_of
from shardwise.stages.split.set_values import MOST_INSIDE, Holder, Values
from shardwise.stages.split.theirs import SPACES, files_named, is_own, is_theirs
from shardwise.torch_private import accumulated_hooks, buffer_slots, every_hook_of, gradient_hooks, submodules

#: The search ends after this many objects beyond the modules: what a loss reads is within reach of them.
_MOST = 2_000
#: Attributes that every module has: torch's own, and `training`, which trials set both ways. A replaced `forward` is
#: handled elsewhere, and engines replace some themselves.
_OF_TORCH = frozenset({*vars(nn.Module()), "forward"})
#: What is no setting of an optimizer. Schedulers put a `step` of their own in front.
_OF_OPTIMIZERS, _PARAMS = frozenset({"param_groups", "state", "defaults", "step"}), frozenset({"params"})
#: A list or a dictionary of a module with more entries is data.
_MOST_ENTRIES = 256
#: Configurations inside of each other.
_DEEPEST = 5
#: What a configuration holds, beside containers.
_LEAVES = (*PLAIN, Enum, PurePath, torch.dtype, torch.device, FunctionType, BuiltinFunctionType, type)
_Next = Iterable[tuple[str, Any]]


def find_holders(module: nn.Module, loss: Any) -> list[Holder]:
    """Return everything that a script can set on a module, its hooks and its loss."""
    found: list[Holder] = []
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = []
    for name, each in module.named_modules():
        seen.add(id(each))
        kind = type(each)
        found += _of_children(name, each)
        waiting += [(name, hook) for hook in every_hook_of(each)]
        # Functions in the place of methods, a forward too.
        waiting += [(name, held) for held in vars(each).values() if isinstance(held, (FunctionType, partial))]
        if is_theirs(kind):
            found.append(Holder(name, _of_dictionary(vars(each), _OF_TORCH), name))
            buffers = buffer_slots(each)
            found += [Holder(name, _of_dictionary(buffers), name)] if buffers else []
            waiting += [(f"{name}.{key}".strip("."), held) for key, held in followed_in(each)]
            if id(kind) not in seen:
                seen.add(id(kind))
                found += [Holder(base.__name__, _of_class(base)) for base in kind.__mro__ if is_theirs(base)]
                waiting += _methods_of(kind)
                waiting += _shared_by(kind)
    return found + _held_from([*waiting, ("", loss)], seen)


def find_holders_of_hooks(module: nn.Module) -> list[Holder]:
    """Return everything that a script can set of what the hooks of parameters read."""
    hooks = [
        (name, hook)
        for name, each in module.named_parameters()
        for hook in (*gradient_hooks(each).values(), *accumulated_hooks(each).values())
    ]
    return _held_from(hooks, {id(each) for each in module.modules()}) if hooks else []


def find_holders_of_optimizer(optimizer: Optimizer) -> list[Holder]:
    """Return everything that a script can set of what the step of its own optimizer reads."""
    kind = type(optimizer)
    groups = optimizer.param_groups
    found = [Holder(kind.__name__, _of_dictionary(vars(optimizer), _OF_OPTIMIZERS))]
    found += [
        Holder(f"{kind.__name__}.param_groups[{n}]", _of_dictionary(each, _PARAMS)) for n, each in enumerate(groups)
    ]
    found += [Holder(base.__name__, _of_class(base)) for base in kind.__mro__ if is_own(base)]
    return found + _held_from([(kind.__name__, each) for each in _functions_in(kind, is_own)], set())


def _held_from(roots: list[tuple[str, Any]], seen: set[int]) -> list[Holder]:
    """Return what can be set within reach of these, other than of objects that were seen."""
    found: list[Holder] = []
    waiting = deque(roots)
    most = len(seen) + len(roots) + _MOST
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
        if isinstance(each, nn.Module):  # Terms that a script appends to a criterion.
            found.append(Holder(name, _of_dictionary(submodules(each))))
        waiting.extend(_held_by(name, each))
    return found


def followed_in(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the objects held by a module that a script may set something in: configurations, and objects of its own
    classes. Long lists and dictionaries are data."""
    held = [(key, each) for key, each in vars(module).items() if key not in _OF_TORCH and not isinstance(each, _LEAVES)]
    return [(key, each) for key, each in held if _is_followed(each) and (_is_settings(each) or _is_scripts(each))]


def _is_followed(held: Any) -> bool:
    if isinstance(held, (nn.Module, type, FunctionType, MethodType)):
        return False
    return not isinstance(held, (dict, list, set)) or len(held) <= _MOST_ENTRIES


def _is_scripts(held: Any) -> bool:
    return type(held) in (dict, list, set) or isinstance(held, SPACES) or is_own(type(held))


def _is_settings(held: Any, depth: int = 0) -> bool:
    """Whether an object holds plain values only, at any depth, such as a configuration."""
    if isinstance(held, _LEAVES):
        return depth > 0
    inside: Any = None
    if type(held) in (dict, list, tuple, set):
        inside = held.values() if type(held) is dict else held
    elif (isinstance(held, SPACES) or is_theirs(type(held))) and not isinstance(held, nn.Module):
        inside = getattr(held, "__dict__", {}).values()
    return bool(inside) and depth < _DEEPEST and all(_is_settings(each, depth + 1) for each in inside)


def _shared_by(kind: type) -> list[tuple[str, Any]]:
    """Return the lists and dictionaries in a class: a registry, modes by name."""
    held = [(key, each) for key, each in vars(kind).items() if type(each) in (dict, list, set) and _is_followed(each)]
    return [(f"{kind.__name__}.{key}", each) for key, each in held if not key.startswith("__")]


def _methods_of(kind: type) -> list[tuple[str, Any]]:
    """Return the functions of a module's class that its forward names, and those that they name."""
    named = _named_by_forward(kind)
    return [(kind.__name__, each) for each in _functions_in(kind, is_theirs) if each.__name__ in named]


def _functions_in(kind: type, is_read: Callable[[Any], bool]) -> Iterator[FunctionType]:
    for base in kind.__mro__:
        for held in vars(base).values() if is_read(base) else ():
            made = getattr(held, "fget", None) or getattr(held, "__func__", held)
            if isinstance(made, FunctionType):
                yield made


def _of_children(name: str, module: nn.Module) -> list[Holder]:
    """Return submodules without parameters, such as activations, which a script may replace."""
    held = submodules(module)
    keys = [key for key, child in held.items() if child is not None and next(child.parameters(), None) is None]
    return [Holder(name, Values(lambda: {key: held.get(key) for key in keys}, held.__setitem__), name)] if keys else []


def _of_class(kind: type) -> Values:
    def read() -> Mapping[str, Any]:
        held = ((key, value) for key, value in vars(kind).items() if not key.startswith("__"))
        return {key: value for key, value in held if type(value) in PLAIN or isinstance(value, (FunctionType, Enum))}

    return Values(read, lambda key, value: setattr(kind, key, value), lambda key: delattr(kind, key))


def _of_dictionary(held: dict[Any, Any], without: frozenset[str] = frozenset()) -> Values:
    def read() -> Mapping[str, Any]:
        return {key: value for key, value in held.items() if type(key) is str and key not in without}

    return Values(read, held.__setitem__, held.pop)


def _of_list(held: list[Any]) -> Values:
    def write(key: str, value: Any) -> None:
        held[int(key) : int(key) + 1] = [value]  # One that was appended comes back to the end.

    def drop(key: str) -> None:
        del held[min(int(key), len(held) - 1)]

    return Values(lambda: {str(key): value for key, value in enumerate(held)}, write, drop)


def _of_set(held: set[Any]) -> Values:
    def write(_: str, value: Any) -> None:
        held.clear()
        held.update(value)

    return Values(lambda: {"entries": frozenset(held)}, write)


def _of_context(variable: ContextVar[Any]) -> Values:
    def read() -> Mapping[str, Any]:
        try:
            return {"value": variable.get()}
        except LookupError:
            return {}

    def write(_: str, value: Any) -> None:
        variable.set(value)

    return Values(read, write)


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
    """Whether a user's forward checks for training or grad mode, or modules have a `train` of their own, which may set
    something that it reads: it may compute something else in evaluation."""
    names = ("training", "is_grad_enabled", "is_inference_mode_enabled")
    return sets_mode(module) or any(names_in_classes(module, name) for name in names)


def sets_mode(module: nn.Module) -> bool:
    """Whether a user's module has a `train` or an `eval` of its own, which may do more than torch's."""
    return any(
        is_theirs(base) and ({"train", "eval"} & vars(base).keys())
        for kind in {type(each) for each in module.modules()}
        for base in kind.__mro__
    )


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
    if isinstance(each, ContextVar):
        return Holder(name, _of_context(each))
    if type(each) is set:
        return Holder(name, _of_set(each)) if len(each) <= MOST_INSIDE else None
    if isinstance(each, nn.Parameter):
        return Holder(name, _of_dictionary(vars(each))) if vars(each) else None
    if isinstance(each, _File):
        return Holder(each.name, _of_file(each))
    if isinstance(each, FunctionType):
        return Holder(each.__name__, _of_dictionary(vars(each))) if is_theirs(each) else None
    if is_array(type(each)):
        return Holder(name, _of_array(each)) if each.size <= MOST_INSIDE and each.dtype.kind in "biuf" else None
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
        return [*inside, *(_methods_of(type(each)) if is_theirs(type(each)) else [])]
    if isinstance(each, dict):
        return [(f"{name}[{key!r}]", value) for key, value in each.items()]
    if isinstance(each, (list, tuple)):
        return [(f"{name}[{key}]", value) for key, value in enumerate(each)]
    if _is_own(each):
        own = [(f"{name}.{key}".strip("."), value) for key, value in vars(each).items()]
        called = [(name, getattr(type(each), "__call__", None))]  # noqa: B004 - the function is needed
        return [*own, *called, *((name, method) for method in _functions_in(type(each), is_own))]
    if isinstance(each, type) and is_own(each) and not issubclass(each, nn.Module):
        shared = [
            (f"{each.__name__}.{key}", held) for key, held in vars(each).items() if type(held) in (dict, list, set)
        ]
        return [*shared, *((each.__name__, method) for method in _functions_in(each, is_own))]
    return ()


def _held_by_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield key, cell
    names = sorted(set(names_in(function.__code__)))
    for name, file in files_named(function.__globals__, names):
        yield name, _File(name, file, names)
        for key in names:
            held = file.get(key)
            is_followed = isinstance(held, (FunctionType, partial, nn.Module, dict, list, set, ContextVar, *SPACES))
            if is_followed or is_array(type(held)) or is_theirs(type(held)):
                yield f"{name}.{key}".strip("."), held
            elif isinstance(held, type) and is_own(held):
                yield key, held
