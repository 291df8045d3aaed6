"""State outside containers: plain values of classes and of files, slots, arrays, random generators, iterators.

`read` takes a snapshot, and `put_back` restores it. An iterator cannot be rewound, so one that a run on the example has
advanced is refused.
"""

import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, GeneratorType
from typing import Any

import torch

from shardwise.errors import ShardwiseError

#: Immutable types that refer to nothing else.
PLAIN: frozenset[type] = frozenset({int, float, bool, str, bytes, type(None)})
#: Tensors of a file and arrays larger than this count as data, not as state: they are not copied.
MOST_BYTES = 2**24


class Watched:
    """State that a forward may change, other than lists and dictionaries. `words` describe changes without values."""

    words: str | None = None

    def read(self) -> Any:
        raise NotImplementedError

    def put_back(self, content: Any) -> None:
        raise NotImplementedError

    def changes(self, content: Any) -> Iterable[tuple[str, Any, Any]]:
        """Return the name, the old value and the new value of each change."""
        now = self.read()
        return [("", content, now)] if now != content else []

    def places(self, content: Any) -> Iterable[tuple[str, dict[str, Any], str]]:
        """Return the name, the holder and the key of each changed value. Only files and classes have any."""
        del content
        return ()


#: The key under which a snapshot has all names, also of values that are not plain.
_NAMES = "__names__"
_NEW = (*PLAIN, list, dict, set, torch.Tensor)


class PlainValues(Watched):
    """Plain values by name: `Block.calls`, or a file's variable that a function writes with `global`.

    A forward may also make the first one of a name: `cls.calls = getattr(cls, "calls", 0) + 1`."""

    def __init__(
        self,
        read: Callable[[], Mapping[str, Any]],
        slots: dict[str, Any],
    ) -> None:
        self._read, self._slots = read, slots

    def read(self) -> dict[str, Any]:
        now = self._read()
        found = {key: value for key, value in now.items() if type(value) in PLAIN and not key.startswith("__")}
        return {**found, _NAMES: frozenset(now)}

    def put_back(self, content: dict[str, Any]) -> None:
        for key, value, _ in self._changed(content):
            self._slots[key] = value
        for key, _, _ in self._made(content):
            self._slots.pop(key)

    def changes(self, content: dict[str, Any]) -> list[tuple[str, Any, Any]]:
        return [*self._changed(content), *self._made(content)]

    def _changed(self, content: dict[str, Any]) -> list[tuple[str, Any, Any]]:
        now = self._read()
        held = [(key, value, now.get(key)) for key, value in content.items() if key != _NAMES]
        return [(key, value, each) for key, value, each in held if each is not value or key not in now]

    def _made(self, content: dict[str, Any]) -> list[tuple[str, Any, Any]]:
        """Return the values under names that there were not."""
        new = [(key, each) for key, each in self._read().items() if key not in content[_NAMES]]
        return [(key, None, each) for key, each in new if not key.startswith("__") and isinstance(each, _NEW)]

    def places(self, content: dict[str, Any]) -> list[tuple[str, dict[str, Any], str]]:
        return [(key, self._slots, key) for key, _, _ in self._changed(content)]


class _ClassSlots(dict[str, Any]):
    """Access to the attributes of a class as to the entries of a dictionary."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self._kind = kind

    def get(self, key: str, default: Any = None) -> Any:
        return vars(self._kind).get(key, default)

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self._kind, key, value)

    def pop(self, key: str, default: Any = None) -> Any:
        found = self.get(key, default)
        if key in vars(self._kind):
            delattr(self._kind, key)
        return found


def values_of_class(kind: type) -> PlainValues:
    return PlainValues(lambda: vars(kind), _ClassSlots(kind))


def values_of_file(file: dict[str, Any], names: Iterable[str]) -> PlainValues:
    """Return the globals of a function that it names."""
    return PlainValues(lambda: {key: file[key] for key in names if key in file}, file)


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names used by a function and by the functions inside it."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from names_in(each)


class SlotValues(Watched):
    """The attributes of an object that are in `__slots__`, and so in no dictionary."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        kinds = [vars(kind).get("__slots__", ()) for kind in type(owner).__mro__]
        self._names = [name for each in kinds for name in ((each,) if isinstance(each, str) else each)]

    def read(self) -> dict[str, Any]:
        return {key: getattr(self._owner, key) for key in self._names if hasattr(self._owner, key)}

    def put_back(self, content: dict[str, Any]) -> None:
        for key, value, _ in self.changes(content):
            if key in content:
                object.__setattr__(self._owner, key, value)
            else:
                object.__delattr__(self._owner, key)

    def changes(self, content: dict[str, Any]) -> list[tuple[str, Any, Any]]:
        now = self.read()
        keys = [*content, *(key for key in now if key not in content)]
        return [(key, content.get(key), now.get(key)) for key in keys if content.get(key) is not now.get(key)]


def slots_of(owner: Any) -> SlotValues | None:
    """Return None for an object without `__slots__`."""
    return SlotValues(owner) if any("__slots__" in vars(kind) for kind in type(owner).__mro__) else None


class ArrayNumbers(Watched):
    """A NumPy array that is written in place."""

    words = "an array, written in place"

    def __init__(self, array: Any) -> None:
        self._array = array

    def read(self) -> Any:
        return self._array.copy()

    def put_back(self, content: Any) -> None:
        if self.changes(content):
            self._array[...] = content

    def changes(self, content: Any) -> list[tuple[str, Any, Any]]:
        now = self._array
        is_same = now.shape == content.shape and now.tobytes() == content.tobytes()
        return [] if is_same else [("", content, now)]


def is_array(kind: type) -> bool:
    """Whether this is a class of NumPy arrays. NumPy is not imported to find out."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.ndarray)


def numbers_of_array(array: Any) -> ArrayNumbers | None:
    """Return None for an array that is read-only, or too large to copy: it counts as data, not as state."""
    is_state = array.flags.writeable and not array.dtype.hasobject and array.nbytes <= MOST_BYTES
    return ArrayNumbers(array) if is_state else None


class Draws(Watched):
    """A random generator that user code has created."""

    words = "was drawn from"

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def read(self) -> Any:
        found = self._generator
        if isinstance(found, torch.Generator):
            return found.get_state().tolist()
        if isinstance(found, random.Random):
            return found.getstate()
        return _as_lists(_bits_of(found).state)

    def put_back(self, content: Any) -> None:
        if self.read() == content:
            return
        found = self._generator
        if isinstance(found, torch.Generator):
            found.set_state(torch.tensor(content, dtype=torch.uint8))
        elif isinstance(found, random.Random):
            found.setstate(content)
        else:
            _bits_of(found).state = content


def draws_of(generator: Any) -> Draws | None:
    """Return None for a generator without readable state, such as `random.SystemRandom`."""
    found = Draws(generator)
    try:
        found.read()
    except (NotImplementedError, AttributeError):
        return None
    return found


def is_generator(kind: type) -> bool:
    """Whether this is a class of random generators of torch, Python or NumPy."""
    return issubclass(kind, (torch.Generator, random.Random)) or kind.__module__.startswith("numpy.random")


def _bits_of(generator: Any) -> Any:
    """Return the bit generator, which has the state of NumPy's generators, both legacy and new."""
    found = getattr(generator, "bit_generator", None)
    return getattr(generator, "_bit_generator", generator) if found is None else found


def _as_lists(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _as_lists(value) for key, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


class Iteration(Watched):
    """The position of an iterator."""

    words = "was advanced"

    def __init__(self, name: str, iterator: Iterator[Any]) -> None:
        self._name, self._iterator = name, iterator

    def read(self) -> Any:
        return _position_of(self._iterator)

    def put_back(self, content: Any) -> None:
        if self.read() != content:
            raise ShardwiseError(
                f"{self._name or 'an iterator'} is an iterator ({type(self._iterator).__name__}), and a forward on the"
                " example has advanced it: it cannot be wound back, so the training would begin further on",
                remedy="a list, and a number in an attribute that says where it is: self.step += 1",
            )


def iteration_of(name: str, iterator: Iterator[Any]) -> Iteration | None:
    """Return None for an iterator whose position cannot be read."""
    found = Iteration(name, iterator)
    return None if found.read() is None else found


def _position_of(each: Any) -> Any:
    """Return a value that is equal as long as the iterator has not advanced; None if there is no way to tell."""
    if isinstance(each, GeneratorType):
        frame = each.gi_frame
        return "ended" if frame is None else (frame.f_lasti, *map(_seen_in, frame.f_locals.values()))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns that 3.14 drops the pickling of itertools.
            return _seen_in(each.__reduce__())
    except Exception:
        told = repr(each)
        return told if told.startswith("count(") else None


def _seen_in(value: Any) -> Any:
    if type(value) in PLAIN:
        return repr(value)
    if isinstance(value, tuple):
        return tuple(map(_seen_in, value))
    if isinstance(value, Iterator):
        return _position_of(value)
    return len(value) if isinstance(value, list) else id(type(value))
