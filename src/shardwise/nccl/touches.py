"""Reads, writes and frees, by compute, of memory that operations use.

A dispatch mode sees every operator of this thread. A free is seen when a storage is emptied, or, if the storage itself
is gone, at the next recorded event.

Of what a copy reads or writes, the last uses before it are needed too: a copy is in no order with what was computed,
unless it follows it. That memory was taken counts as a write, since others may have used it just before.
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
#: Where a touch is in the record: the number of events before it, and its stream.
Where = tuple[int, str]


class _Tracked(NamedTuple):
    """Memory of an operation, without a touch since its issue that must be ordered after it."""

    number: int
    span: Span
    storage: StorageWeakRef


class Memories:
    """Numbers of storages, each valid while the storage exists; and the memory that operations use."""

    def __init__(self, told: Told, here: Callable[[], Where]) -> None:
        self._told, self._here = told, here
        self._numbers: dict[int, tuple[int, StorageWeakRef]] = {}
        self._count = 0
        self._tracked: dict[int, list[_Tracked]] = {}
        #: By storage, the last use of each of its parts that no copy has followed yet; None if nothing is copied.
        self._latest: dict[int, dict[tuple[int, int, bool], Where]] | None = None
        #: The numbers of storages on the host.
        self._on_host: set[int] = set()

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
    def are_wanted(self) -> bool:
        """Whether touches are of interest now."""
        return bool(self._tracked) or self._latest is not None

    def follow(self) -> None:
        """Keep the last uses of all memory from now on: there are copies."""
        self._latest = {}

    def note_host(self, tensor: Tensor) -> None:
        """A tensor is in the memory of the host, of which only the host and copies know."""
        span = self.span_of(tensor, writes=False)
        if span is not None:
            self._on_host.add(span.memory)

    def is_on_host(self, span: Span) -> bool:
        return span.memory in self._on_host

    def take_latest(self, tensor: Tensor, *, writes: bool) -> Iterator[tuple[Kind, Span, Where]]:
        """Yield, once, the last uses of a tensor's bytes that what reads it (or writes it) must come after."""
        span = self.span_of(tensor, writes=writes)
        latest = None if self._latest is None else self._latest.get(storage_id(tensor.untyped_storage()))
        if span is None or not latest:
            return
        for part in [each for each in latest if (writes or each[2]) and each[0] < span.stop and span.start < each[1]]:
            start, stop, was_written = part
            used = Span(memory=span.memory, start=start, stop=stop)
            yield Kind.WRITE if was_written else Kind.READ, used, latest.pop(part)

    def take(self, key: int, size: int) -> None:
        """A storage has memory, which may have been another's."""
        if self._latest is not None:
            self._latest[key] = {(0, size, True): self._here()}

    def touch(self, tensor: Tensor, *, writes: bool) -> None:
        """What is computed reads or writes a tensor."""
        key = storage_id(tensor.untyped_storage())
        if self._latest is not None:
            self._latest.setdefault(key, {})[*extent(tensor), writes] = self._here()
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
            self._on_host.discard(self._numbers.pop(key)[0])

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
        self._known: dict[Any, tuple[tuple[tuple[str, bool], ...], bool]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if not (self._memories.are_wanted and self._listens()):
            return func(*args, **given)
        known = self._known.get(func)
        if known is None:
            known = self._known[func] = _touched_by(func), _takes_memory(func)
        touched, takes = known
        if touched:
            self._note(touched, args, given)
        made = func(*args, **given)
        for tensor in _tensors_in(made) if takes else ():
            if not tensor.is_meta:
                self._memories.take(storage_id(tensor.untyped_storage()), tensor.untyped_storage().nbytes())
        return made

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


def _takes_memory(operator: Any) -> bool:
    """Whether what it returns is new, and no view of an argument."""
    return not any(each.alias_info for each in schema_of(operator).returns)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            if isinstance(each, Tensor):
                yield each
