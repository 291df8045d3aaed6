"""Streams, which run work in order, and events in them that other streams wait for.

An event is a point in a stream's order. Work that needs what came before the event is put after it. The host never
polls an event unless a user asks for a value. A CPU place's streams are threads. A GPU's are in `cuda.py`.

One thread submits all work, and only after events that exist already. So the order of submission is a valid order of
execution, and streams cannot deadlock.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Protocol

#: The work itself: no arguments, and the result is ignored.
Run = Callable[[], object]

#: Turns an exception into the error that the user sees.
Blame = Callable[[Exception], Exception]


class Stream(Protocol):
    """Runs the work that is put into it in order."""

    name: str
    #: When all work put so far will be done, by the machine's clock.
    tail_seconds: float
    #: The event of the last work put.
    last: "Event | None"

    def put(self, run: Run, after: Sequence["Event"], blame: Blame) -> "Event":
        """Run something after all earlier work of this stream and after the given events."""
        ...

    def is_done(self, event: "Event") -> bool:
        """Whether an event of this stream has been reached."""
        ...

    def wait(self, event: "Event") -> None:
        """Block the calling thread until an event of this stream has been reached."""
        ...

    def wait_issued(self, event: "Event") -> None:
        """Block the calling thread until a GPU can wait on the event."""
        ...

    def close(self) -> None:
        """Close the stream once it has run all work."""
        ...


class Event:
    """A point in a stream's order, reached when all work before it is done."""

    cuda_event: object = None  # The CUDA event, once it is recorded.
    end_seconds = 0.0  # By the machine's clock.
    note = -1  # The number of its note in the machine's journal.

    def __init__(self, stream: Stream, number: int) -> None:
        self.stream = stream
        self.number = number

    def is_done(self) -> bool:
        """Whether it has been reached."""
        return self.stream.is_done(self)

    def wait(self) -> None:
        """Block the calling thread until it has been reached."""
        self.stream.wait(self)


def latest(events: Iterable[Event]) -> list[Event]:
    """Return the last event of each stream, which is reached after that stream's others."""
    found: dict[Stream, Event] = {}
    for event in events:
        known = found.get(event.stream)
        if known is None or event.number > known.number:
            found[event.stream] = event
    return list(found.values())


def as_it_is(error: Exception) -> Exception:
    """Return the error unchanged: it says enough."""
    return error


class Failures:
    """The first error of any stream. Work after it does not run, so that nothing is computed from invalid data."""

    def __init__(self) -> None:
        self.first: Exception | None = None
        self._lock = threading.Lock()

    def note(self, error: Exception) -> None:
        """Keep an error if it is the first."""
        with self._lock:
            if self.first is None:
                self.first = error


class ThreadStream:
    """A stream that is a thread, started when the first work is put into it."""

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
        self.wait(event)  # A GPU cannot wait for a thread, so the thread's work must be done.

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
            # Drop all references, so that tensors in finished work are freed while the queue is empty.
            del item, run, after, blame
            with self._moved_on:
                self._num_done = event.number
                self._moved_on.notify_all()
