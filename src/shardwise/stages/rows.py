"""Which entries of a batch have one row for each of its rows: found at any depth, and the same in every batch.

    {"input_ids": [8, 64], "meta": {"labels": [8]}, "names": ["a", ...8], "weight": [3]}
     cut                            cut             cut                  whole: 3 is not 8

An entry that is as long as the batch by chance looks like rows. `whole(x)` says that it is not, and `rows(x)` that a
list is. An entry once seen with a length other than the batch's does not count as rows in later batches either.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from shardwise.errors import ShardwiseError

_TEXT = (str, bytes, type(None))
_NUMBERS = (int, float, complex)
_IN_LIST = re.compile(r"\[\d+\]")


class Marked:
    """An entry of a batch that the user has marked with `whole` or `rows`."""

    __slots__ = ("is_rows", "value")

    def __init__(self, value: Any, *, is_rows: bool) -> None:
        self.value, self.is_rows = value, is_rows


def whole(value: Any) -> Any:
    """Mark an entry of a batch, or anything inside one, that every rank and every microbatch gets whole."""
    return Marked(value, is_rows=False)


def rows(value: Any) -> Any:
    """Mark an entry of a batch, or anything inside one, that has an element for each row of the batch."""
    return Marked(value, is_rows=True)


class Seen(NamedTuple):
    """The number of rows of a batch, and the paths of the entries that are cut along them."""

    length: int
    paths: frozenset[str]


class RowRule:
    """Decides which entries of a batch are rows, and remembers its decisions. `names` are the arguments of forward."""

    def __init__(self, names: Mapping[str, Any] | None = None) -> None:
        self._names = names or {}
        #: By path, whether it was cut, and the length that it had then.
        self._kept: dict[str, tuple[bool, int]] = {}
        #: Entries as long as the batch that a trial with numbers has shown not to be its rows.
        self.tables: set[str] = set()
        self.last: Seen | None = None

    def look(self, batch: Mapping[str, Any]) -> Seen:
        """Return which entries of this batch are rows. Refuse an entry that could be either."""
        length = self.length(batch)
        self.last = Seen(length, frozenset(self._paths(batch, "", length)))
        return self.last

    def _paths(self, value: Any, path: str, length: int) -> Iterator[str]:
        for key, child in _children(value) or ():
            here = _path(path, key)
            if self._is_rows(here, child, length):
                yield here  # What is inside goes with it.
            elif not isinstance(child, Marked):
                yield from self._paths(child, here, length)

    @property
    def uncut(self) -> set[str]:
        """The entries seen so far that are not rows."""
        return self.tables | {path for path, (is_rows, _) in self._kept.items() if not is_rows}

    def length(self, batch: Mapping[str, Any]) -> int:
        """Return the most common first dim of tensors. Those that forward takes count twice."""
        votes: Counter[int] = Counter()
        lists: Counter[int] = Counter()
        for path, value in nodes(batch):
            weight = 2 if _top(path) in self._names else 1
            if isinstance(value, Marked) and value.is_rows:
                return len(value.value)
            if _is_array(value) and not _IN_LIST.search(path):
                votes[value.shape[0]] += weight
            elif _is_list(value) and value and (_all(value, _TEXT) or _all(value, (Mapping,))):
                lists[len(value)] += weight
        for found in (votes, lists):
            if found:
                return found.most_common(1)[0][0]
        inside = next((path for path, value in nodes(batch) if _is_list(value) and _all(value, (Tensor,))), None)
        if inside is not None:
            raise ShardwiseError(
                f"the batch has its tensors in a list, {inside}: has that an entry for each row, or has each of its"
                " tensors all rows?",
                remedy=f'batch["{inside}"] = sw.rows(batch["{inside}"]), or torch.stack of it',
            )
        raise ShardwiseError(
            "the batch holds no tensor, so it has no length to cut into microbatches",
            remedy='a dictionary like {"input_ids": ids, "labels": labels}',
        )

    def _is_rows(self, path: str, value: Any, length: int) -> bool:
        if isinstance(value, Marked):
            return value.is_rows
        if path in self.tables or not (_is_array(value) or _is_list(value)):
            return False
        num = value.shape[0] if _is_array(value) else len(value)
        before = self._kept.get(path)
        if num != length:
            if before is not None and before[0]:
                raise ShardwiseError(
                    f"{path} has {num} entries in a batch of {length} rows, and in one of {before[1]} rows it had as"
                    " many and was cut: it is no part of the rows",
                    remedy=f"batch[{path!r}] = sw.whole(batch[{path!r}]), also in the batches before",
                )
            if length > 1:  # In a batch of one row, lengths tell nothing.
                self._kept[path] = (False, num)
            return False
        if before is not None and not before[0]:
            return False
        found = _is_array(value) or _list_of_rows(path, value, length)
        if length > 1 and found:
            self._kept[path] = (True, length)
        return found


def nodes(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield everything in a batch with its path, containers before their contents. Marked entries are not opened."""
    for key, child in _children(value) or ():
        here = _path(path, key)
        yield here, child
        yield from nodes(child, here)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors of a batch, at any depth."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Marked):
        yield from tensors_in(value.value)
    else:
        for _, child in _children(value) or ():
            yield from tensors_in(child)


def changed(value: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """Replace nodes by `change(path, node)`; if that is None, look inside. Containers without changes stay the same."""
    made = {}
    for key, child in _children(value) or ():
        here = _path(path, key)
        new = change(here, child)
        new = changed(child, change, here) if new is None else new
        if new is not child:
            made[key] = new
    return _filled(value, made) if made else value


def take_rows(batch: Mapping[str, Any], seen: Seen, first: int, end: int) -> Mapping[str, Any]:
    """Return the rows from first to end, and all other entries unchanged, without marks."""

    def take(path: str, value: Any) -> Any:
        inner = value.value if isinstance(value, Marked) else value
        if path in seen.paths:
            return _sliced(inner, first, end)
        return inner if isinstance(value, Marked) else None

    found = changed(batch, take)
    return dict(found) if found is batch else found


def _sliced(value: Any, first: int, end: int) -> Any:
    """Return some rows with a version counter of their own: a write to them must not invalidate saved other rows."""
    found = value[first:end]
    if not isinstance(found, Tensor) or not found.requires_grad:
        return found.data if isinstance(found, Tensor) else found
    # A new leaf, so that `batch["x"].grad` stays None rather than hold the gradient of these rows only.
    return found.detach().requires_grad_()


def unmarked(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a batch without marks."""
    return changed(batch, lambda _, value: value.value if isinstance(value, Marked) else None)  # type: ignore[no-any-return]


def check_openable(batch: Mapping[str, Any]) -> None:
    """Refuse entries whose rows cannot be seen, which would go whole to every rank, and results of a graph."""
    for path, value in nodes(batch):
        if isinstance(value, PackedSequence):
            raise ShardwiseError(
                f"{path} is a PackedSequence, whose rows are not one after the other, so it cannot be cut",
                remedy="padded rows and their lengths in the batch, and pack_padded_sequence in forward",
            )
        if isinstance(value, Tensor) and value.grad_fn is not None:
            raise ShardwiseError(
                f"{path} was computed with a gradient, and what has computed it would get one of some rows alone",
                remedy=f"compute it in the module; or batch[{path!r}].detach()",
            )
        if isinstance(value, Tensor) and (value.layout is not torch.strided or value.is_nested):
            kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            raise ShardwiseError(
                f"{path} is a {kind} tensor, which has no rows to be cut",
                remedy=f"batch[{path!r}].to_dense(), or to_padded_tensor(0) of a nested one, and back in forward; or"
                f" sw.whole(batch[{path!r}]) if every rank needs all of it",
            )
        if _children(value) is None and not isinstance(value, (Tensor, Marked, type)):
            held = getattr(value, "__dict__", None)
            if isinstance(held, dict) and any(isinstance(each, Tensor) for each in held.values()):
                raise ShardwiseError(
                    f"{path} is a {type(value).__name__}, whose tensors are not seen and so not cut",
                    remedy=f"its tensors in a dictionary, or sw.whole(batch[{path!r}]) if every rank needs all of it",
                )


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the contents of a container; None if it is not one."""
    if isinstance(value, PackedSequence):
        return None
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (list, tuple)) and type(value) is not torch.Size:
        return list(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return [(each.name, getattr(value, each.name)) for each in fields(value)]
    return None


def _filled(value: Any, made: Mapping[Any, Any]) -> Any:
    """Return a container like this with some of its contents replaced."""
    if isinstance(value, Mapping):
        if type(value) is dict:
            return {**value, **made}
        filled = copy(value)
        for key, new in made.items():
            filled[key] = new  # type: ignore[index]
        return filled
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return value._replace(**made)  # type: ignore[attr-defined]
    if isinstance(value, (list, tuple)):
        return type(value)([made.get(number, each) for number, each in enumerate(value)])
    filled = copy(value)
    for key, new in made.items():
        object.__setattr__(filled, key, new)
    return filled


def _is_array(value: Any) -> bool:
    """Whether a value is a tensor or a numpy array with at least one dim."""
    if isinstance(value, Tensor):
        return value.dim() > 0
    return type(value).__module__ == "numpy" and bool(getattr(value, "shape", ()))


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields") and type(value) is not torch.Size


def _all(value: Any, kinds: tuple[type, ...]) -> bool:
    return bool(value) and all(isinstance(each, kinds) for each in value)


def _list_of_rows(path: str, value: Any, length: int) -> bool:
    """Whether a list that is as long as the batch has an entry for each row."""
    if _all(value, _TEXT):
        return True
    inside = list(tensors_in(value))
    if inside and not all(each.dim() and each.shape[0] == length for each in inside):
        return True
    if not inside and not _all(value, _NUMBERS):
        return False
    kind = "tensors that are as long" if inside else "numbers"
    raise ShardwiseError(
        f"{path} is a {type(value).__name__} of {length} {kind}, as many as the batch has rows: is there one for each"
        " row?",
        remedy=f"batch[{path!r}] = sw.rows(batch[{path!r}]), or sw.whole of it if not"
        + ("" if inside else "; or a tensor"),
    )


def _path(path: str, key: Any) -> str:
    return f"{path}[{key!r}]" if path else str(key)


def _top(path: str) -> str:
    return path.partition("[")[0]
