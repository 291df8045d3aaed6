"""A GPU's streams that only keep books: whatever touches the same memory has to be in an order that waits have made.

Everything runs at once, on the CPU. But each operation is noted in a stream, after what it was told to wait for, with
the memory that it reads and writes: of two that touch the same memory, one of them writing, the later one must come
after the earlier one by the waits alone. A clock of each operation says how far of every stream it comes after.
"""

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.dataflow.streams import Event
from shardwise.states.tiers.copy_streams import CopyStreams

Clock = dict[str, int]


class Touch:
    """Memory that an operation touches. The tensor is kept, so that no other one ever has its address."""

    def __init__(self, tensor: Tensor, *, writes: bool) -> None:
        self._tensor, self.writes = tensor, writes
        self.begin = tensor.data_ptr()
        self.end = self.begin + tensor.numel() * tensor.element_size()


class _Noted(NamedTuple):
    stream: str
    number: int
    touch: Touch


class BookEvent(Event):
    """A point in a stream. The host that has seen it reached tells the device of nothing before it any more."""

    def __init__(self, copies: "RacyCopyStreams", clock: Clock) -> None:
        self._copies, self.clock = copies, clock

    def wait(self) -> None:
        self._copies.seen(self.clock)

    def is_done(self) -> bool:
        if self._copies.die.random() < 0.5:
            return False
        self._copies.seen(self.clock)
        return True


class RacyCopyStreams(CopyStreams):
    """A way to the host whose streams are books."""

    def __init__(self, seed: int, beside: "RacyCopyStreams | None" = None) -> None:
        """Those `beside` others have the same books and streams of their own to and from the host."""
        self.device, self._side = torch.device("cpu"), None
        self.die = random.Random(seed)
        self._called = "" if beside is None else " beside"
        self._books: threading.RLock = threading.RLock() if beside is None else beside._books
        self._streams: defaultdict[str, Clock] = defaultdict(dict) if beside is None else beside._streams
        self._host: Clock = {} if beside is None else beside._host
        self._noted: list[_Noted] = [] if beside is None else beside._noted

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def to_device(self, here: Tensor, home: Tensor, after: Sequence[Event] = ()) -> Event:
        with self._books, torch.no_grad():
            here.view(-1).copy_(home.view(-1))
            return self._note(f"in{self._called}", [Touch(here, writes=True), Touch(home, writes=False)], after)

    def to_host_after(self, home: Tensor, here: Tensor, after: Sequence[Event] = ()) -> Event:
        with self._books, torch.no_grad():
            home.view(-1).copy_(here.view(-1))
            return self._note(f"out{self._called}", [Touch(home, writes=True), Touch(here, writes=False)], after)

    def computed(self) -> list[Event]:
        with self._books:
            return [BookEvent(self, dict(self._streams["compute"]))]

    def run_after(self, run: Callable[[], object], after: Sequence[Event]) -> list[Event]:
        with self._books:
            with _Touched() as touched:
                run()
            return [self._note("side", touched.found, after)]

    def follow(self, event: Event) -> None:
        with self._books:
            assert isinstance(event, BookEvent)
            _join(self._streams["compute"], event.clock)

    def compute(self, reads: Iterable[Tensor] = (), writes: Iterable[Tensor] = ()) -> None:
        """Something is computed in the user's stream."""
        with self._books:
            touches = [Touch(each, writes=False) for each in reads] + [Touch(each, writes=True) for each in writes]
            self._note("compute", touches, ())

    def seen(self, clock: Clock) -> None:
        """The host knows that this has been reached."""
        with self._books:
            _join(self._host, clock)

    def close(self) -> None:
        """There is nothing to end."""

    def _note(self, stream: str, touches: Sequence[Touch], after: Sequence[Event]) -> Event:
        clock = self._streams[stream]
        _join(clock, self._host)
        for event in after:
            assert isinstance(event, BookEvent)
            _join(clock, event.clock)
        known = [each for each in self._noted if clock.get(each.stream, 0) < each.number]
        for touch in touches:
            for other in known:
                assert not _meet(touch, other.touch), f"{stream} does not wait for {other.stream}"
        clock[stream] = clock.get(stream, 0) + 1
        self._noted += [_Noted(stream, clock[stream], touch) for touch in touches if touch.begin < touch.end]
        return BookEvent(self, dict(clock))


class _Touched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what operations of torch touch; views touch nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Touch] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if not func.is_view:
                writes = argument.alias_info is not None and argument.alias_info.is_write
                tensors = value if isinstance(value, list | tuple) else [value]
                self.found += [Touch(each, writes=writes) for each in tensors if isinstance(each, Tensor)]
        return func(*args, **(kwargs or {}))


def _meet(one: Touch, other: Touch) -> bool:
    return (one.writes or other.writes) and one.begin < other.end and other.begin < one.end


def _join(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)
