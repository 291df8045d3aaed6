"""Streams: what runs first to last, and events in them that others wait for.

An event is a point in a stream's order. Whoever needs what came before it is put after it; nobody asks whether it has
been reached unless a person wants to see a value. A CPU place's streams are threads. A GPU's are in `cuda.py`.

What is put is put by one thread, and only after events that exist. So the order of putting is an order in which
everything can run, and no two streams ever wait for each other.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Protocol

#: The work itself: it is given nothing and gives nothing back.
Run = Callable[[], object]

#: Makes the error that a person reads out of what was raised.
Blame = Callable[[Exception], Exception]


class Stream(Protocol):
    """Runs what is put into it, first to last."""

    name: str
    #: When all that was put so far will be done, by the machine's clock.
    tail_seconds: float
    #: The event of what was put last.
    last: "Event | None"

    def put(self, run: Run, after: Sequence["Event"], blame: Blame) -> "Event":
        """Run something after everything put before it and after the given events."""
        ...

    def is_done(self, event: "Event") -> bool:
        """Whether an event of this stream has been reached."""
        ...

    def wait(self, event: "Event") -> None:
        """Hold the calling thread until an event of this stream has been reached."""
        ...

    def wait_issued(self, event: "Event") -> None:
        """Hold the calling thread until a GPU could be told to wait for the event."""
        ...

    def close(self) -> None:
        """End the stream once it has run everything."""
        ...


class Event:
    """A point in a stream's order, reached when everything before it is done."""

    cuda_event: object = None  # A GPU's own event, once it is recorded.
    end_seconds = 0.0  # By the machine's clock.
    note = -1  # Which note of the machine's journal describes it.

    def __init__(self, stream: Stream, number: int) -> None:
        self.stream = stream
        self.number = number

    def is_done(self) -> bool:
        """Whether it has been reached."""
        return self.stream.is_done(self)

    def wait(self) -> None:
        """Hold the calling thread until it has been reached."""
        self.stream.wait(self)


def latest(events: Iterable[Event]) -> list[Event]:
    """The last event of each stream: it is reached after the others."""
    found: dict[Stream, Event] = {}
    for event in events:
        known = found.get(event.stream)
        if known is None or event.number > known.number:
            found[event.stream] = event
    return list(found.values())


def as_it_is(error: Exception) -> Exception:
    """Blame nobody: what was raised says enough."""
    return error


class Failures:
    """The first error of any stream. What is put after it is not run, so that nothing is computed from rubbish."""

    def __init__(self) -> None:
        self.first: Exception | None = None
        self._lock = threading.Lock()

    def note(self, error: Exception) -> None:
        """Keep an error if it is the first."""
        with self._lock:
            if self.first is None:
                self.first = error


class ThreadStream:
    """A stream that is a thread. It is started by what is first put into it."""

    def __init__(self, name: str, failures: Failures) -> None:
        self.name = name
        self.tail_seconds = 0.0
        self.last: Event | None = None
        self._failures = failures
        self._queue: SimpleQueue[tuple[Event, Run, Sequence[Event], Blame] | None] = SimpleQueue()
        self._num_put = 0
        self._num_done = 0
        self._moved_on = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, run: Run, after: Sequence[Event], blame: Blame) -> Event:
        self._num_put += 1
        event = self.last = Event(self, self._num_put)
        self._queue.put((event, run, after, blame))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"shardwise {self.name}", daemon=True)
            self._thread.start()
        return event

    def is_done(self, event: Event) -> bool:
        return self._num_done >= event.number

    def wait(self, event: Event) -> None:
        if self._num_done < event.number:
            with self._moved_on:
                self._moved_on.wait_for(lambda: self._num_done >= event.number)

    def wait_issued(self, event: Event) -> None:
        self.wait(event)  # A GPU cannot wait for a thread, so what it needs of one has to be done.

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            event, run, after, blame = item
            for other in after:
                other.wait()
            if self._failures.first is None:
                try:
                    run()
                except Exception as error:
                    self._failures.note(blame(error))
            # No name may keep what was run, and the tensors in it, while the queue is empty.
            del item, run, after, blame
            with self._moved_on:
                self._num_done = event.number
                self._moved_on.notify_all()
