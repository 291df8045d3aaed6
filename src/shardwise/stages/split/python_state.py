"""Save and restore the Python state that a forward may change: attributes, lists, closures, random generators.

A run on the example must have no side effects, and stages that are tried in one process must not see each other's
state. So everything that can be reached from a module and a loss is saved and restored: attributes of modules and of
the user's objects; lists, dictionaries and sets in them; tensors and arrays that are written in place; closures,
defaults and attributes of functions; the global generators of Python and NumPy; plain values of classes and files, and
generators that the user created (`drawn_state.py`, `python_draws.py`). Functions under `lru_cache` are found here, and
their entries are kept until all trials are over (`remembered.py`).
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial, wraps
from operator import is_
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.stages.split.drawn_state import (
    MOST_BYTES,
    PLAIN,
    Watched,
    draws_of,
    is_array,
    is_generator,
    iteration_of,
    names_in,
    numbers_of_array,
    slots_of,
    values_of_class,
    values_of_file,
)
from shardwise.stages.split.names_reached import may_draw
from shardwise.stages.split.python_draws import python_draws, set_python_draws
from shardwise.stages.split.same_values import is_same_list, repeats, same, told
from shardwise.stages.split.seed import seeded_alike
from shardwise.stages.split.theirs import SPACES, files_named, is_own, is_theirs
from shardwise.torch_private import buffer_slots, parameter_slots, submodules, version_of

_P = ParamSpec("_P")
_R = TypeVar("_R")
#: The walk ends after this many objects: what a forward changes is within reach of them.
_MOST = 200_000

_CONTAINERS = (list, dict, set, deque)
#: The class of functions under `lru_cache` or `cache`.
_REMEMBERING = type(lru_cache(int))
#: Names and objects to visit next.
_Next = Iterable[tuple[str, Any]]


class _Kept(NamedTuple):
    """A mutable object, its name and its saved content. A tensor's content is a copy; None if it cannot be restored."""

    name: str
    holder: Any
    content: Any


class PythonState:
    """A snapshot that `restore` puts back. `roots` are a module, and functions.

    The values of buffers are saved: of other modules that are reached (a criterion, a critic that the loss calls), and,
    if `with_buffers`, of the first root too. Those of parameters never are, and no optimizer's state.
    """

    def __init__(self, *roots: Any, with_buffers: bool = False) -> None:
        self._roots, self._with_buffers = roots, with_buffers
        apart = [each for each in roots[:1] if isinstance(each, nn.Module) and not with_buffers]
        self._apart = {id(each) for root in apart for each in root.modules()}  # Their buffers are not saved.
        self._kept: list[_Kept] = []
        self._empty: list[tuple[str, OrderedDict[Any, Any]]] = []
        #: The names of buffers whose values are not saved: a forward may register new ones.
        self._buffers: list[tuple[dict[str, Any], frozenset[str]]] = []
        self._versions, self._seen = dict[int, int](), set[int]()
        self._kinds: dict[type, _Note | None] = {}
        #: The names used in the user's functions.
        self.named: set[str] = set()
        #: Functions under `lru_cache`; and the parameters of all modules, whose values are not saved.
        self.remembering, self.parameters = list[Any](), list[nn.Parameter]()
        self._drawn = python_draws()
        for root in roots:
            self._walk(root)

    def _walk(self, root: Any) -> None:
        seen, kinds = self._seen, self._kinds
        waiting: deque[tuple[str, Any]] = deque([("", root)])
        while waiting and len(seen) < _MOST:
            name, each = waiting.popleft()
            kind = type(each)
            if kind in PLAIN or id(each) in seen:
                continue
            seen.add(id(each))
            if kind not in kinds:
                kinds[kind] = _way_to_note(kind)
            note = kinds[kind]
            if note is not None:
                waiting.extend(note(self, name, each))

    def _note_dict(self, name: str, each: dict[Any, Any]) -> _Next:
        self._kept.append(_Kept(name, each, dict(each)))
        return [(f"{name}[{key!r}]", value) for key, value in each.items() if type(value) not in PLAIN]

    def _note_list(self, name: str, each: Any) -> _Next:
        self._kept.append(_Kept(name, each, list(each)))
        return self._note_tuple(name, each)

    def _note_tuple(self, name: str, each: Any) -> _Next:
        return [(f"{name}[{key!r}]", value) for key, value in enumerate(each) if type(value) not in PLAIN]

    def _note_method(self, name: str, each: MethodType) -> _Next:
        return (name, each.__self__), (name, each.__func__)

    def _note_partial(self, name: str, each: "partial[Any]") -> _Next:
        return (name, each.func), (name, each.args), (name, each.keywords)

    def _note_cell(self, name: str, each: CellType) -> _Next:
        content = _content_of(each)
        self._kept.append(_Kept(name, each, content))
        return ((name, content),)

    def _note_module(self, name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
        buffers, children, start = buffer_slots(module), submodules(module), f"{name}." if name else ""
        slots = {id(parameter_slots(module)), id(children), id(buffers)}
        attributes = vars(module)
        self._kept.append(_Kept(name, attributes, attributes.copy()))
        self.parameters += [each for each in parameter_slots(module).values() if each is not None]
        for key, each in attributes.items():
            if type(each) is OrderedDict and not each:
                # Most of a module's attributes are empty dictionaries of hooks.
                if id(each) not in self._seen:
                    self._seen.add(id(each))
                    self._empty.append((start + key, each))
            elif type(each) not in PLAIN and id(each) not in slots:
                yield start + key, each
        yield from ((start + key, child) for key, child in children.items())
        if id(module) in self._apart:
            self._buffers.append((buffers, frozenset(buffers)))
        else:
            self._kept.append(_Kept(name, buffers, buffers.copy()))
            yield from ((start + key, each) for key, each in buffers.items())
        if is_theirs(type(module)):
            yield from self._note_class(name, type(module))

    def _note_class(self, name: str, kind: type) -> Iterator[tuple[str, Any]]:
        """Save a class's state, which all of its modules share. Its forward may also use state of its file."""
        for each in kind.__mro__:
            if is_theirs(each):
                self._watch(each.__name__, values_of_class(each))
                own = [(key, value) for key, value in vars(each).items() if _is_state(value)]
                yield from ((f"{each.__name__}.{key}", value) for key, value in own)
                if is_own(each):  # Methods that its forward calls may use other state of its file.
                    yield from ((name, value) for value in vars(each).values() if isinstance(value, FunctionType))
        yield name, getattr(kind, "forward", None)

    def _watch(self, name: str, holder: Watched | None) -> None:
        if holder is not None:
            self._kept.append(_Kept(name, holder, holder.read()))

    def _note_drawn(self, name: str, each: Any) -> _Next:
        self._watch(name, draws_of(each) if is_generator(type(each)) else iteration_of(name, each))
        return ()

    def _note_array(self, name: str, each: Any) -> _Next:
        self._watch(name, numbers_of_array(each))
        return ()

    def _note_remembering(self, name: str, each: Any) -> _Next:
        self.remembering.append(each)
        return ((name, each.__wrapped__),)

    def _note_attributes(self, name: str, each: Any) -> _Next:
        slots = slots_of(each)
        self._watch(name, slots)
        held = {**({} if slots is None else slots.read()), **getattr(each, "__dict__", {})}
        if hasattr(each, "__dict__"):
            self._kept.append(_Kept(name, vars(each), vars(each).copy()))
        # Copies of an optimizer's state may be on their way to the host.
        return [(_joined(name, k), v) for k, v in held.items() if k != "state" or not isinstance(each, Optimizer)]

    def _note_function(self, name: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
        if not is_theirs(function):
            return
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            yield _joined(name, key) if not isinstance(_content_of(cell), nn.Module) else name, cell
        yield name, function.__defaults__
        yield name, function.__kwdefaults__
        self._kept.append(_Kept(_joined(name, function.__name__), vars(function), vars(function).copy()))
        yield from ((_joined(name, key), each) for key, each in vars(function).items())
        names = sorted(set(names_in(function.__code__)))
        self.named.update(names)
        for place, file in files_named(function.__globals__, names):
            self._watch(place, values_of_file(file, names))
            for key in names:
                yield from self._note_named(_joined(place, key), file.get(key))

    def _note_named(self, name: str, held: Any) -> _Next:
        """Return what to visit of a value that a function reads from a file."""
        if isinstance(held, type):
            if not is_own(held) or issubclass(held, nn.Module) or id(held) in self._seen:
                return ()
            self._seen.add(id(held))
            return self._note_class(name, held)
        kind = type(held)
        is_followed = _is_state(held) or isinstance(held, Iterator) or is_generator(kind)
        if not is_followed and not is_own(held if isinstance(held, FunctionType) else kind):
            return ()
        if isinstance(held, Tensor) and held.nbytes > MOST_BYTES:
            return ()
        return ((name, held),)

    def _note_tensor(self, name: str, tensor: Tensor) -> _Next:
        if not isinstance(tensor, nn.Parameter) and type(tensor) is Tensor:
            is_fixed = tensor.is_meta or tensor.grad_fn is not None or tensor.is_inference() or repeats(tensor)
            self._versions[id(tensor)] = -1 if tensor.is_inference() else version_of(tensor)
            self._kept.append(_Kept(name, tensor, None if is_fixed else tensor.detach().clone()))
        return ()

    def _noted(self) -> Iterator[_Kept]:
        """Yield everything saved, except dictionaries that were empty and still are."""
        yield from self._kept
        yield from (_Kept(name, each, {}) for name, each in self._empty if each)

    def changed(self) -> dict[str, str]:
        """Return a description of each change, by name."""
        found: dict[str, str] = {}
        for name, holder, content in self._noted():
            found.update(self._differences(name, holder, content))
        return found

    def results(self) -> list[str]:
        """Return the names of entries that now hold tensors that require a gradient, and did not before."""
        return [
            _joined(name, str(key))
            for name, holder, content in self._noted()
            if isinstance(holder, _CONTAINERS)
            for key, each in (holder.items() if isinstance(holder, dict) else enumerate(holder))
            if isinstance(each, Tensor) and each.requires_grad and not _holds(content, key, each)
        ]

    def assigned(self) -> Iterator[tuple[str, dict[Any, Any], Any]]:
        """Yield changed attributes and entries of dictionaries: name, dictionary and key."""
        for name, holder, content in self._noted():
            if isinstance(holder, dict):
                yield from (
                    (_joined(name, str(key)), holder, key)
                    for key, each in holder.items()
                    if each is not content.get(key, _EMPTY) or (id(each) in self._versions and self._is_written(each))
                )

    def set_now(self) -> Iterator[tuple[str, dict[Any, Any], Any]]:
        """Yield them and those of files and classes: what is set for a while, as flags are."""
        yield from self.assigned()
        for _, holder, content in self._noted():
            yield from holder.places(content) if isinstance(holder, Watched) else ()

    def have_drawn(self) -> bool:
        """Whether the global generator of Python or NumPy was drawn from."""
        return not self._drawn.are_here

    def _differences(self, name: str, holder: Any, content: Any) -> Iterator[tuple[str, str]]:
        if isinstance(holder, Tensor):
            if self._is_written(holder) and (content is None or not same(holder, content)):
                yield name, "a tensor, written in place"
        elif isinstance(holder, Watched):
            for key, was, now in holder.changes(content):
                yield _joined(name, key), holder.words or told(was, now)
        elif isinstance(holder, CellType):
            if not same(_content_of(holder), content):
                yield name, told(content, _content_of(holder))
        elif isinstance(holder, dict) and isinstance(content, dict):
            if _is_unchanged(holder, content):
                return
            for key in [*content, *(key for key in holder if key not in content)]:
                if not same(holder.get(key), content.get(key)):
                    yield _joined(name, str(key)), told(content.get(key), holder.get(key))
        elif len(holder) != len(content):
            yield name, f"{len(content)} entries, then {len(holder)}"
        elif any(not same(one, other) for one, other in zip(holder, content, strict=True)):
            yield name, "a list of other things"

    def _is_written(self, tensor: Tensor) -> bool:
        return not tensor.is_inference() and version_of(tensor) != self._versions[id(tensor)]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything."""
        for _, holder, content in self._noted():
            if isinstance(holder, dict):  # Most are attributes of modules.
                _put_back(holder, content)
            elif isinstance(holder, Tensor):
                if content is not None:
                    holder.data.copy_(content)  # Through `data`, which leaves the version counter unchanged.
            elif isinstance(holder, Watched):
                holder.put_back(content)
            elif isinstance(holder, CellType):
                if content is not _EMPTY:
                    holder.cell_contents = content
            elif not is_same_list(holder, content):
                holder.clear()
                (holder.update if isinstance(holder, set) else holder.extend)(content)
        for buffers, names in self._buffers:
            for name in buffers.keys() - names:
                del buffers[name]
        set_python_draws(self._drawn)

    def again(self) -> "PythonState":
        """Take a new snapshot of the same roots."""
        return PythonState(*self._roots, with_buffers=self._with_buffers)


def held_now(state: PythonState) -> set[tuple[int, Any, int]]:
    """Return what attributes, lists and closures hold that did not hold it before: holder, key and value by id."""
    found = {(id(holder), key, id(holder[key])) for _, holder, key in state.assigned()}
    for _, holder, content in state._noted():
        if isinstance(holder, (list, deque)) and not is_same_list(holder, content):
            found.update((id(holder), number, id(each)) for number, each in enumerate(holder))
        elif isinstance(holder, CellType) and _content_of(holder) is not content:
            found.add((id(holder), "", id(_content_of(holder))))
    return found


@contextmanager
def left_as_it_was(*roots: Any) -> Iterator[None]:
    """Restore at exit all state that is reached from these roots. Used to try a loss, for example."""
    kept = PythonState(*roots, with_buffers=True)
    try:
        yield
    finally:
        kept.restore()


@contextmanager
def classes_left_as_they_were(kinds: Iterable[type], *roots: Any) -> Iterator[None]:
    """Restore at exit the state of the user's classes, what their methods reach, and what these roots reach."""
    kept = PythonState(*roots)
    for kind in dict.fromkeys(kinds):
        for _, each in kept._note_class("", kind) if is_theirs(kind) else ():
            kept._walk(each)
    try:
        yield
    finally:
        kept.restore()


def leaves_classes(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Do so for a function that runs a copy of its module: the copy shares classes, the state of their files, and
    generators with the module.

    The function begins with the same seed on every rank: what a forward skips at random is the same on all of them.
    """

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        module: Any = args[0]
        # Also on the meta device: draws that name no device are made on the host.
        with classes_left_as_they_were(map(type, module.modules())), seeded_alike():
            return function(*args, **kwargs)

    return run


def _holds(content: Any, key: Any, each: Any) -> bool:
    """Whether it was there, or replaces a tensor that required a gradient: `weight_norm` makes one in every forward."""
    if not isinstance(content, dict):
        return any(other is each for other in content)
    return isinstance(content.get(key), Tensor) and content[key].requires_grad


def _put_back(holder: dict[Any, Any], content: dict[Any, Any]) -> None:
    if _is_unchanged(holder, content):
        return
    for key in [key for key in holder if key not in content]:
        del holder[key]
    holder.update(content)


def _is_unchanged(holder: Mapping[Any, Any], content: Mapping[Any, Any]) -> bool:
    """Whether the same objects are there, in the same order. This is the usual case, so the check is cheap."""
    return (
        len(holder) == len(content)
        and all(map(is_, holder.values(), content.values()))
        and all(map(is_, holder, content))
    )


_Note = Callable[[PythonState, str, Any], _Next]


def _way_to_note(kind: type) -> _Note | None:
    """Return the method that saves objects of a class and returns what they hold; None if there is nothing to do."""
    ways: list[tuple[Any, _Note]] = [
        (nn.Module, PythonState._note_module),
        (Tensor, PythonState._note_tensor),
        (dict, PythonState._note_dict),
        ((list, set, deque), PythonState._note_list),
        (tuple, PythonState._note_tuple),
        (FunctionType, PythonState._note_function),
        (MethodType, PythonState._note_method),
        (partial, PythonState._note_partial),
        (CellType, PythonState._note_cell),
        (SPACES, PythonState._note_attributes),
    ]
    if issubclass(kind, (*PLAIN, type)):
        return None
    if kind is _REMEMBERING:
        return PythonState._note_remembering
    if is_array(kind):
        return PythonState._note_array
    if is_generator(kind) or (issubclass(kind, Iterator) and not is_theirs(kind)):
        return PythonState._note_drawn
    own = PythonState._note_attributes if is_theirs(kind) else None
    return next((way for classes, way in ways if issubclass(kind, classes)), own)


def _is_state(value: Any) -> bool:
    """Whether this value of a class or a file is mutable state that a forward may write to."""
    if isinstance(value, (*_CONTAINERS, *SPACES, Tensor)) or type(value) is _REMEMBERING or is_array(type(value)):
        return True
    return not isinstance(value, (FunctionType, type, nn.Module)) and is_own(type(value))


def remembers_draws(*roots: Any) -> bool:
    """Whether a function under `lru_cache` draws at random: its first draw is then used in every call."""
    return any(may_draw(each.__wrapped__) for each in PythonState(*roots).remembering)


class _Empty:
    """Stands for the content of an empty cell."""


_EMPTY = _Empty()


def _content_of(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name and key else name or str(key)
