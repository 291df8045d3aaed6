"""What a forward may leave behind in plain Python: attributes, lists, closures, random numbers.

A run on the example must leave no trace, and stages that are tried in one process must not see what only another would
have. So all that can be reached from a module and from a loss is noted, and put back: attributes of modules and of the
user's objects, lists, dictionaries and sets in them, tensors and arrays that are written in place, what functions close
over and have for defaults and attributes, and the state of Python's and NumPy's generators; numbers of classes and of
files, and generators of one's own (`drawn_state.py`, `python_draws.py`). What functions remember by `lru_cache` is
found here, and kept until all trials are over (`remembered.py`).
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
from shardwise.stages.split.theirs import SPACES, files_named, is_own, is_theirs
from shardwise.torch_private import buffer_slots, parameter_slots, submodules, version_of

_P = ParamSpec("_P")
_R = TypeVar("_R")
#: No more is looked at than this many things: what a forward changes is not that far away.
_MOST = 200_000

_CONTAINERS = (list, dict, set, deque)
#: The class of functions under `lru_cache` or `cache`.
_REMEMBERING = type(lru_cache(int))
#: Names, and what is to be looked at next.
_Next = Iterable[tuple[str, Any]]


class _Kept(NamedTuple):
    """Something that can change, by name, and what was in it. For a tensor that is its numbers, or None of a result."""

    name: str
    holder: Any
    content: Any


class PythonState:
    """What was there when this was made; `restore` has it there again. `roots` are a module, and functions.

    Buffers are noted with the numbers in them if `with_buffers`, parameters never.
    """

    def __init__(self, *roots: Any, with_buffers: bool = False) -> None:
        self._roots, self._with_buffers = roots, with_buffers
        self._kept: list[_Kept] = []
        self._empty: list[tuple[str, OrderedDict[Any, Any]]] = []
        #: Which buffers modules had, where their numbers are not noted: a forward may register some.
        self._buffers: list[tuple[dict[str, Any], frozenset[str]]] = []
        self._versions: dict[int, int] = {}
        self._seen: set[int] = set()
        self._kinds: dict[type, _Note | None] = {}
        #: What functions of the user's own name.
        self.named: set[str] = set()
        #: Functions under `lru_cache`.
        self.remembering: list[Any] = []
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
        for key, each in attributes.items():
            if type(each) is OrderedDict and not each:
                # Most of a module's attributes are dictionaries of hooks, without any.
                if id(each) not in self._seen:
                    self._seen.add(id(each))
                    self._empty.append((start + key, each))
            elif type(each) not in PLAIN and id(each) not in slots:
                yield start + key, each
        yield from ((start + key, child) for key, child in children.items())
        if self._with_buffers:
            self._kept.append(_Kept(name, buffers, buffers.copy()))
            yield from ((start + key, each) for key, each in buffers.items())
        else:
            self._buffers.append((buffers, frozenset(buffers)))
        if is_theirs(type(module)):
            yield from self._note_class(name, type(module))

    def _note_class(self, name: str, kind: type) -> Iterator[tuple[str, Any]]:
        """Lists of a class are there once for all of its modules, and its forward may use those of its file."""
        for each in kind.__mro__:
            if is_theirs(each):
                self._watch(each.__name__, values_of_class(each))
                own = [(key, value) for key, value in vars(each).items() if _is_state(value)]
                yield from ((f"{each.__name__}.{key}", value) for key, value in own)
                if is_own(each):  # What its forward calls of it may use other things of its file.
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
        held = {} if slots is None else slots.read()
        if hasattr(each, "__dict__"):
            self._kept.append(_Kept(name, vars(each), vars(each).copy()))
            held.update(vars(each))
        return [(_joined(name, key), value) for key, value in held.items()]

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
        """What a function reads of a file."""
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
            writable = not tensor.is_meta and tensor.grad_fn is None and not tensor.is_inference()
            self._versions[id(tensor)] = -1 if tensor.is_inference() else version_of(tensor)
            self._kept.append(_Kept(name, tensor, tensor.detach().clone() if writable else None))
        return ()

    def _noted(self) -> Iterator[_Kept]:
        """All that was noted, but for dictionaries that were empty and are."""
        yield from self._kept
        yield from (_Kept(name, each, {}) for name, each in self._empty if each)

    def changed(self) -> dict[str, str]:
        """What is no longer as it was, by name, in words."""
        found: dict[str, str] = {}
        for name, holder, content in self._noted():
            found.update(self._differences(name, holder, content))
        return found

    def results(self) -> list[str]:
        """The names of what holds tensors that want a gradient, and did not."""
        return [
            _joined(name, str(key))
            for name, holder, content in self._noted()
            if isinstance(holder, _CONTAINERS)
            for key, each in (holder.items() if isinstance(holder, dict) else enumerate(holder))
            if isinstance(each, Tensor) and each.requires_grad and not _holds(content, key, each)
        ]

    def assigned(self) -> Iterator[tuple[str, dict[Any, Any], Any]]:
        """Attributes and entries of dictionaries that are others than they were: their names, where, and which."""
        for name, holder, content in self._noted():
            if isinstance(holder, dict):
                yield from (
                    (_joined(name, str(key)), holder, key)
                    for key, each in holder.items()
                    if each is not content.get(key, _EMPTY) or (id(each) in self._versions and self._is_written(each))
                )

    def set_to_plain(self) -> Iterator[tuple[str, dict[Any, Any], Any]]:
        """The same of numbers, words and None alone, with those of files: flags that are set for a while."""
        yield from (each for each in self.assigned() if type(each[1][each[2]]) in PLAIN)
        for _, holder, content in self._noted():
            yield from holder.places(content) if isinstance(holder, Watched) else ()

    def have_drawn(self) -> bool:
        """Whether Python's or NumPy's generators have been drawn from."""
        return not self._drawn.are_here

    def _differences(self, name: str, holder: Any, content: Any) -> Iterator[tuple[str, str]]:
        if isinstance(holder, Tensor):
            if self._is_written(holder) and (content is None or not _same(holder, content)):
                yield name, "a tensor, written in place"
        elif isinstance(holder, Watched):
            for key, was, now in holder.changes(content):
                yield _joined(name, key), holder.words or _told(was, now)
        elif isinstance(holder, CellType):
            if not _same(_content_of(holder), content):
                yield name, _told(content, _content_of(holder))
        elif isinstance(holder, dict) and isinstance(content, dict):
            if _is_unchanged(holder, content):
                return
            for key in [*content, *(key for key in holder if key not in content)]:
                if not _same(holder.get(key), content.get(key)):
                    yield _joined(name, str(key)), _told(content.get(key), holder.get(key))
        elif len(holder) != len(content):
            yield name, f"{len(content)} entries, then {len(holder)}"
        elif any(not _same(one, other) for one, other in zip(holder, content, strict=True)):
            yield name, "a list of other things"

    def _is_written(self, tensor: Tensor) -> bool:
        return not tensor.is_inference() and version_of(tensor) != self._versions[id(tensor)]

    @torch.no_grad()
    def restore(self) -> None:
        """Have everything as it was."""
        for _, holder, content in self._noted():
            if isinstance(holder, dict):  # Most are attributes of modules.
                _put_back(holder, content)
            elif isinstance(holder, Tensor):
                if content is not None:
                    holder.data.copy_(content)  # Through `data`: that it was put back does not count as written.
            elif isinstance(holder, Watched):
                holder.put_back(content)
            elif isinstance(holder, CellType):
                if content is not _EMPTY:
                    holder.cell_contents = content
            elif len(holder) != len(content) or any(a is not b for a, b in zip(holder, content, strict=True)):
                holder.clear()
                (holder.update if isinstance(holder, set) else holder.extend)(content)
        for buffers, names in self._buffers:
            for name in buffers.keys() - names:
                del buffers[name]
        set_python_draws(self._drawn)

    def again(self) -> "PythonState":
        """The same of now."""
        return PythonState(*self._roots, with_buffers=self._with_buffers)


@contextmanager
def left_as_it_was(*roots: Any) -> Iterator[None]:
    """What is run within it, and is reached from these, leaves nothing behind: a loss that is tried, say."""
    kept = PythonState(*roots)
    try:
        yield
    finally:
        kept.restore()


def leaves_classes(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The same for a function that runs a copy of the module it is given: classes, what their files hold, and torch's
    generators are those of the copy too."""

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        module: Any = args[0]
        kept = PythonState()
        for kind in {type(each): None for each in module.modules()}:
            if is_theirs(kind):
                for _, each in kept._note_class("", kind):
                    kept._walk(each)
        try:
            # Also on the meta device: what is drawn there without a word of its device is drawn on the host.
            with torch.random.fork_rng({each.device for each in module.parameters() if each.is_cuda}):
                return function(*args, **kwargs)
        finally:
            kept.restore()

    return run


def _holds(content: Any, key: Any, each: Any) -> bool:
    """Whether it was there, or another that it is in the place of: what `weight_norm` makes anew in every forward."""
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
    """Whether the very same things are there, in the same order: most often they are, so this is quick."""
    return (
        len(holder) == len(content)
        and all(map(is_, holder.values(), content.values()))
        and all(map(is_, holder, content))
    )


_Note = Callable[[PythonState, str, Any], _Next]


def _way_to_note(kind: type) -> _Note | None:
    """What is done with things of a class: what is in them is kept, and what they hold is looked at next."""
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
    """Whether this is something of a class, or of a file, that a forward may write into."""
    if isinstance(value, (*_CONTAINERS, *SPACES, Tensor)) or type(value) is _REMEMBERING or is_array(type(value)):
        return True
    return not isinstance(value, (FunctionType, type, nn.Module)) and is_own(type(value))


def remembers_draws(*roots: Any) -> bool:
    """Whether a function under `lru_cache` draws at random: what it draws once is used from then on."""
    return any(may_draw(each.__wrapped__) for each in PythonState(*roots).remembering)


class _Empty:
    """What a cell holds that nothing was put into."""


_EMPTY = _Empty()


def _content_of(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name and key else name or str(key)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor) and one is not other:
        alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
        return alike and not one.is_meta and torch.equal(one, other)
    if isinstance(one, (bool, int, float, str)) and type(one) is type(other):
        return bool(one == other) or (one != one and other != other)
    return one is other


def _told(before: Any, now: Any) -> str:
    """What has become of a thing, in a few words."""
    if isinstance(now, (bool, int, float, str)):
        return f"{type(now).__name__} {now!r}"[:40] if before is None else f"{before!r}, then {now!r}"[:60]
    return f"a {type(now).__name__}"
