"""Reads, writes and frees, by compute, of memory that operations use.

A dispatch mode sees every operator of this thread. A free is seen when a storage is emptied, or, if the storage itself
is gone, at the next recorded event.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.nccl.program import Kind, Span
from shardwise.torch_private import EagerDispatchMode, schema_of, storage_id

#: Operators that do not access the data of a tensor, besides those that return a view.
_LOOKS_ONLY = (
    *("empty_like", "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like"),
    *("full_like", "rand_like", "randn_like", "set_", "resize_", "record_stream", "sym_size", "sym_stride"),
)

#: A callback for a touch: its kind, the number of the operation, and the bytes.
Told = Callable[[Kind, int, Span], None]


class _Tracked(NamedTuple):
    """Memory of an operation, without a touch since its issue that must be ordered after it."""

    number: int
    span: Span
    storage: StorageWeakRef


class Memories:
    """Numbers of storages, each valid while the storage exists; and the memory that operations use."""

    def __init__(self, told: Told) -> None:
        self._told = told
        self._numbers: dict[int, tuple[int, StorageWeakRef]] = {}
        self._count = 0
        self._tracked: dict[int, list[_Tracked]] = {}

    def span_of(self, tensor: Tensor, *, writes: bool) -> Span | None:
        """Return the bytes of a tensor, or None if it has none."""
        if tensor.is_meta or not tensor.numel():
            return None
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        known = self._numbers.get(key)
        # While a weak reference to a freed storage exists, no other storage gets its id.
        if known is None:
            self._count += 1
            known = self._numbers[key] = (self._count, StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        start, stop = extent(tensor)
        return Span(memory=known[0], start=start, stop=stop, writes=writes)

    def track(self, number: int, tensors: Iterable[tuple[Tensor, bool]]) -> tuple[Span, ...]:
        """Return the bytes that an operation reads or, with True, writes. Their next touch will be reported."""
        spans = []
        for tensor, writes in tensors:
            span = self.span_of(tensor, writes=writes)
            if span is not None:
                spans.append(span)
                key = storage_id(tensor.untyped_storage())
                self._tracked.setdefault(key, []).append(_Tracked(number, span, self._numbers[key][1]))
        return tuple(spans)

    @property
    def are_tracked(self) -> bool:
        return bool(self._tracked)

    def touch(self, tensor: Tensor, *, writes: bool) -> None:
        """What is computed reads or writes a tensor."""
        key = storage_id(tensor.untyped_storage())
        found = self._tracked.get(key)
        if found is None:
            return
        start, stop = extent(tensor)
        left = []
        for each in found:
            span = each.span
            if (writes or span.writes) and start < span.stop and span.start < stop:
                bytes_ = Span(memory=span.memory, start=max(start, span.start), stop=min(stop, span.stop))
                self._told(Kind.WRITE if writes else Kind.READ, each.number, bytes_)
            else:
                left.append(each)
        self._keep(key, left)

    def empty(self, key: int) -> None:
        """A storage has given its memory back."""
        for each in self._tracked.pop(key, ()):
            self._told(Kind.FREE, each.number, each.span)

    def sweep(self) -> None:
        """Look which storages are gone."""
        for key in [key for key, found in self._tracked.items() if _is_gone(found[0].storage)]:
            self.empty(key)
        for key in [key for key, (_, storage) in self._numbers.items() if _is_gone(storage)]:
            del self._numbers[key]

    def _keep(self, key: int, left: list[_Tracked]) -> None:
        if left:
            self._tracked[key] = left
        else:
            del self._tracked[key]


def _is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]


def extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one after its last."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if tensor.is_contiguous():
        return start, start + tensor.numel() * size
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (int(last) + 1) * size


class TouchMode(EagerDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that this thread runs while `listens` is true."""

    def __init__(self, memories: Memories, listens: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memories, self._listens = memories, listens
        self._known: dict[Any, tuple[tuple[str, bool], ...]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if self._memories.are_tracked and self._listens():
            touched = self._known.get(func)
            if touched is None:
                touched = self._known[func] = _touched_by(func)
            if touched:
                self._note(touched, args, given)
        return func(*args, **given)

    def _note(self, touched: Sequence[tuple[str, bool]], args: Sequence[Any], given: Mapping[str, Any]) -> None:
        for place, (name, writes) in enumerate(touched):
            if name and (place < len(args) or name in given):
                for tensor in _tensors_in(args[place] if place < len(args) else given[name]):
                    if not tensor.is_meta:
                        self._memories.touch(tensor, writes=writes)


def _touched_by(operator: Any) -> tuple[tuple[str, bool], ...]:
    """Return each argument's name, empty if its values are not accessed, and whether they are written."""
    name = operator.overloadpacket.__name__
    if operator.namespace == "c10d" or name in _LOOKS_ONLY:
        return ()
    touched = []
    for each in schema_of(operator).arguments:
        alias = each.alias_info
        is_view = alias is not None and not alias.is_write
        touched.append(("" if is_view else each.name, alias is not None and bool(alias.is_write)))
    return tuple(touched)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            if isinstance(each, Tensor):
                yield each
