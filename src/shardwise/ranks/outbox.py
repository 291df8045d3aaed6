"""Hold sent tensors until they have arrived: a tensor in transit must not be freed.

gloo's work cannot be polled, only waited for. Small amounts are simply held until the step ends. A thread that waits
beside the computation would free them sooner, but waking it for each message made a message of 8 bytes take 1,800
microseconds instead of 110 (2 busy cores, torch 2.13). So a thread handles only the amount beyond `_HELD_BYTES`: then
messages are large, and holding those of every microbatch could cost more memory than the step.
"""

import queue
import threading
from collections import deque
from datetime import timedelta
from typing import Any, NamedTuple

from torch import Tensor

from shardwise.ranks.faults import Watch
from shardwise.ranks.message_layout import Key

_HELD_BYTES = 64 * 2**20
_FOREVER = timedelta(days=1)


class Sent(NamedTuple):
    """A tensor in transit, as part of a message, and its destination rank in the world."""

    work: Any
    tensor: Tensor
    key: Key
    peer: int


class WaitingOutbox:
    """For gloo. The newest are held; a thread waits for those before them, in order."""

    def __init__(self, watch: Watch | None, held_bytes: int = _HELD_BYTES) -> None:
        self._watch, self._most_bytes = watch, held_bytes
        self._newest: deque[Sent] = deque()
        self._num_bytes = 0
        self._older: queue.SimpleQueue[Sent | threading.Event | None] = queue.SimpleQueue()
        self._oldest: Sent | None = None
        self._last_waited: Any = None  # As in the transport.
        self._broken: tuple[RuntimeError, int] | None = None
        self._thread: threading.Thread | None = None

    def put(self, sent: Sent) -> None:
        """Hold it until it has arrived."""
        self._newest.append(sent)
        self._num_bytes += sent.tensor.nbytes
        while self._num_bytes > self._most_bytes:
            oldest = self._newest.popleft()
            self._num_bytes -= oldest.tensor.nbytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._let_go, name="shardwise-outbox", daemon=True)
                self._thread.start()
            self._older.put(oldest)

    def drain(self) -> None:
        """Wait until everything has arrived."""
        if self._thread is not None:
            self._drain_thread()
        while self._newest:
            sent = self._newest.popleft()
            if self._watch is None:
                sent.work.wait()
            else:
                self._watch.wait(sent.work, sent.key.sending, sent.peer)
            self._last_waited = sent.work
        self._num_bytes = 0

    def close(self) -> None:
        """Release everything."""
        self._newest.clear()
        self._last_waited = None
        if self._thread is not None:
            self._older.put(None)
            self._thread = None

    def _drain_thread(self) -> None:
        arrived = threading.Event()
        self._older.put(arrived)
        if self._watch is None:
            arrived.wait()
        else:
            self._watch.wait_for(arrived, self._where)
        if self._broken is not None:
            error, target = self._broken
            if self._watch is None:
                raise error
            self._watch.explain(error, target)

    def _where(self) -> tuple[object, int] | None:
        oldest = self._oldest
        return None if oldest is None else (oldest.key.sending, oldest.peer)

    def _let_go(self) -> None:
        while (item := self._older.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            self._oldest = item
            try:
                item.work.wait(_FOREVER)
            except RuntimeError as error:
                self._broken = (error, item.peer)
            # While the queue is empty, no local variable may keep an arrived tensor alive.
            self._oldest = None
            del item


class StreamWork:
    """Work of NCCL, which runs on a stream of the device.

    A wait with a timeout would block the host until it has ended. Without one, later computation waits for it on the
    device, and the host continues.
    """

    __slots__ = ("_work",)

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> None:  # noqa: ARG002 - an aborted group ends it
        self._work.wait()


class StreamOutbox:
    """For NCCL, whose work runs on a stream and can be polled.

    A tensor may be freed once its work is done, or once the computing stream waits for it: its memory is reused in the
    order of that stream.
    """

    def __init__(self) -> None:
        self._sent: deque[Sent] = deque()

    def put(self, sent: Sent) -> None:
        while self._sent and self._sent[0].work.is_completed():
            self._sent.popleft()
        self._sent.append(sent)

    def drain(self) -> None:
        while self._sent:
            self._sent.popleft().work.wait()

    def close(self) -> None:
        self._sent.clear()
