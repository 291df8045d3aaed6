"""A GPU that is late: streams whose work is done when it is drawn, in any order that their waits allow.

What a stream does not wait for is done too early here sooner or later, and somebody reads wrong bytes.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from threading import RLock

from torch import Tensor


class LateDevice:
    """In the place of `torch.cuda`; its bytes are a CPU's."""

    def __init__(self, seed: int) -> None:
        self._dice, self._lock = Random(seed), RLock()
        self.streams: list[LateStream] = []
        self._current = [self.Stream()]

    def Stream(self, _: object = None) -> "LateStream":  # noqa: N802
        self.streams.append(LateStream(self))
        return self.streams[-1]

    def Event(self, **_: object) -> "LateEvent":  # noqa: N802
        return LateEvent(self)

    def current_stream(self, _: object = None) -> "LateStream":
        return self._current[-1]

    @contextmanager
    def stream(self, stream: "LateStream") -> Iterator[None]:
        self._current.append(stream)
        yield
        self._current.pop()

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.begin(lambda: target.copy_(source))

    def begin(self, work: Callable[[], object]) -> None:
        with self._lock:
            self.current_stream().todo.append((None, work))

    def work(self, count: int) -> None:
        """Do up to so many things that can be done."""
        with self._lock:
            for _ in range(count):
                able = [each for each in self.streams if each.is_able()]
                if not able:
                    return
                self._dice.choice(able).todo.popleft()[1]()

    def work_until(self, is_over: Callable[[], bool]) -> None:
        with self._lock:
            while not is_over():
                assert any(each.is_able() for each in self.streams), "streams wait for each other"
                self.work(1)


class LateStream:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.todo: deque[tuple[LateEvent | None, Callable[[], object]]] = deque()

    def is_able(self) -> bool:
        return bool(self.todo) and (self.todo[0][0] is None or self.todo[0][0].query())

    def wait_event(self, event: "LateEvent") -> None:
        self.todo.append((event, lambda: None))

    def wait_stream(self, other: "LateStream") -> None:
        event = LateEvent(self._device)
        with self._device.stream(other):
            event.record()
        self.wait_event(event)

    def synchronize(self) -> None:
        self._device.work_until(lambda: not self.todo)


class LateEvent:
    def __init__(self, device: LateDevice) -> None:
        self._device, self._is_done = device, False

    def record(self) -> None:
        self._device.begin(self._end)

    def query(self) -> bool:
        return self._is_done

    def synchronize(self) -> None:
        self._device.work_until(self.query)

    def elapsed_time(self, _: "LateEvent") -> float:
        return 0.0

    def _end(self) -> None:
        self._is_done = True
