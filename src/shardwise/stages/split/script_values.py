"""Values that a script may set between steps, where a forward or a loss can read them: numbers, words, functions.

Attributes of modules of the user's own and of criterions, entries of dictionaries and lists, what functions close over,
and names of a file and of a class: `criterion.hard = True`, `weight["contrast"] = 0.5`, `MODE = "max"`,
`block.act = nn.Softmax(-1)`, `weight.fill_(0.5)`. They are looked for once; then reading all of them is a few
dictionaries.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardwise.stages.split.drawn_state import PLAIN
from shardwise.stages.split.python_state import is_theirs
from shardwise.torch_private import buffer_slots, submodules, version_of

#: No more things are looked at than these: a loss does not reach that far.
_MOST = 2_000
#: Attributes that every module has: torch's own, and `training`, which trials have both ways. A forward that is put in
#: place is looked at elsewhere, and engines put some.
_OF_TORCH = frozenset({*vars(nn.Module()), "forward"})
_CALLED = (FunctionType, BuiltinFunctionType, MethodType, partial, nn.Module)
_Next = Iterable[tuple[str, Any]]


class Number:
    """A tensor of one number as it was: the same as another of it if nothing was written in between."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version, self.was = tensor, _version(tensor), tensor.detach().clone()

    def is_still(self, tensor: Any) -> bool:
        return tensor is self.tensor and _version(tensor) == self.version

    def __repr__(self) -> str:
        return f"{self.was.item():g}"


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else version_of(tensor)


class Values:
    """What is in one place, by name."""

    def __init__(
        self, read: Callable[[], Mapping[str, Any]], write: Callable[[str, Any], None],
        drop: Callable[[str], Any] = lambda _: None,
    ) -> None:  # fmt: skip
        #: Has nothing there.
        self.drop = drop
        self._read, self._write = read, write
        self._numbers: dict[str, Number] = {}

    def read(self) -> dict[str, Any]:
        """Those that can be told apart: plain ones, functions and modules, tensors of one number."""
        found = {}
        for key, value in self._read().items():
            if type(value) in PLAIN or isinstance(value, _CALLED):
                found[key] = value
            elif isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad and not value.is_meta:
                known = self._numbers.get(key)
                if known is None or not known.is_still(value):
                    known = self._numbers[key] = Number(value)
                found[key] = known
        return found

    def put(self, key: str, value: Any) -> None:
        """Have a value there. What is written into a tensor so does not count as written."""
        if isinstance(value, Number):
            value.tensor.data.copy_(value.was)
            value = value.tensor
        self._write(key, value)


class Holder(NamedTuple):
    """Where values are, by the name of what holds them. `module` is the path of one of the root's modules, if it is."""

    name: str
    values: Values
    module: str | None = None


def find_holders(module: nn.Module, loss: Any) -> list[Holder]:
    """All that can be set, of a module and of its loss."""
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
    while waiting and len(seen) < most:
        name, each = waiting.popleft()
        if type(each) in PLAIN or id(each) in seen:
            continue
        seen.add(id(each))
        holder = _holder_of(name, each)
        found += [] if holder is None else [holder]
        waiting.extend(_held_by(name, each))
    return found


def shared_by(module: nn.Module) -> list[tuple[str, Any]]:
    """What a module holds that has nothing but plain values in it: a configuration."""
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
    """Submodules without parameters, which a script may exchange: activations."""
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


def _of_cell(name: str, cell: CellType) -> Values:
    def read() -> dict[str, Any]:
        return {name: cell.cell_contents} if _is_full(cell) else {}

    def write(_: str, value: Any) -> None:
        cell.cell_contents = value

    return Values(read, write)


def _of_file(function: FunctionType) -> Values:
    file, names = function.__globals__, sorted(set(names_in(function.__code__)))
    return Values(lambda: {key: file[key] for key in names if key in file}, file.__setitem__)


def names_in(code: CodeType) -> Iterator[str]:
    """What a function names, and functions inside of it."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from names_in(each)


def names_in_classes(module: nn.Module, name: str) -> bool:
    """Whether a forward of the user's own, of a module or one below it, names something; or a method that it names."""
    return any(name in _named_by_forward(kind) for kind in {type(each) for each in module.modules()})


def asks_for_mode(module: nn.Module) -> bool:
    """Whether a forward of the user's own asks how it is run: it may do something else in evaluations."""
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
    if isinstance(each, FunctionType):
        return Holder("", _of_file(each)) if is_theirs(each) else None
    is_own = is_theirs(type(each)) and not isinstance(each, type) and hasattr(each, "__dict__")
    return Holder(name, _of_dictionary(vars(each))) if is_own else None


def _held_by(name: str, each: Any) -> _Next:
    """What is looked at next."""
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
    if is_theirs(type(each)) and not isinstance(each, type) and hasattr(each, "__dict__"):
        own = [(f"{name}.{key}".strip("."), value) for key, value in vars(each).items()]
        return [*own, (name, getattr(type(each), "__call__", None))]  # noqa: B004 - its function is wanted
    return ()


def _held_by_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield key, cell
    for key in names_in(function.__code__):
        held = function.__globals__.get(key)
        if isinstance(held, (FunctionType, partial, nn.Module, dict, list)) or is_theirs(type(held)):
            yield key, held
