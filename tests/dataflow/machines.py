"""Machines for tests: places without a clock to wait for, and streams that run in an order chosen by a die."""

import random
from collections import deque
from collections.abc import Callable, Sequence

from shardwise.dataflow.place import MakeStream
from shardwise.dataflow.streams import Blame, Event, Failures, Run

FOUR = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]


class Shuffle:
    """Streams that run only when somebody waits, and then whichever is ready is chosen by a die.

    What is not ordered by an event runs in every order in some run: a wait that is missing is found, and found again.
    """

    def __init__(self, seed: int) -> None:
        self._die = random.Random(seed)
        self._streams: list[ShuffledStream] = []

    def make(self) -> MakeStream:
        """The maker of streams that a machine is given."""

        def make_stream(name: str, failures: Failures) -> ShuffledStream:
            stream = ShuffledStream(name, failures, self.run_until)
            self._streams.append(stream)
            return stream

        return make_stream

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """Run one thing after another until something is so."""
        while not is_over():
            ready = [stream for stream in self._streams if stream.is_ready()]
            assert ready, "streams wait for each other"
            self._die.choice(ready).run_one()


class ShuffledStream:
    """One stream of a shuffle."""

    def __init__(self, name: str, failures: Failures, run_until: Callable[[Callable[[], bool]], None]) -> None:
        self.name = name
        self.tail_seconds = 0.0
        self.last: Event | None = None
        self._failures = failures
        self._run_until = run_until
        self._queue: deque[tuple[Run, Sequence[Event], Blame]] = deque()
        self._num_put = self._num_done = 0

    def put(self, run: Run, after: Sequence[Event], blame: Blame) -> Event:
        self._num_put += 1
        self._queue.append((run, list(after), blame))
        self.last = Event(self, self._num_put)
        return self.last

    def is_ready(self) -> bool:
        """Whether its next work may run."""
        return bool(self._queue) and all(event.is_done() for event in self._queue[0][1])

    def run_one(self) -> None:
        """Run its next work."""
        run, _, blame = self._queue.popleft()
        if self._failures.first is None:
            try:
                run()
            except Exception as error:
                self._failures.note(blame(error))
        self._num_done += 1

    def is_done(self, event: Event) -> bool:
        return self._num_done >= event.number

    def wait(self, event: Event) -> None:
        self._run_until(lambda: self.is_done(event))

    def wait_issued(self, event: Event) -> None:
        self.wait(event)

    def close(self) -> None:
        self._run_until(lambda: not self._queue)
