"""Messages between ranks of one machine, through shared memory of each pair.

Every pair of ranks has a block of memory, half of it for each direction, and a socket. A sender copies its message into
its half and announces its offset on the socket. The receiver copies it out when it is needed, and from time to time
reports how many messages it has read, so that their space can be reused:

    sender                         socket                        receiver
    copy in, at 128      ---- payload, 128, 64 bytes ---->       wait on the socket; copy out
    free the first 64    <--------- read, 64 -------------

No helper thread is involved: the sender wakes the waiting receiver directly. gloo has a thread at both ends, and on
busy processors each of them must first be scheduled. The socket orders the accesses to the memory, and its closing
reveals at once that the other process is gone. No file name outlives the processes.
"""

import contextlib
import ctypes
import mmap
import os
import select
import shutil
import socket
import struct
import tempfile
import weakref
from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.ranks import objects

#: The largest message for this path: for a larger one, gloo's threads, which move it beside computation, pay off.
MOST_BYTES = 16 * 2**20
# A receiver reports after this many bytes, or this many messages, read: a Linux socket holds about 270 unread messages.
_TELL_AFTER_BYTES = 2**18
_TELL_AFTER = 64
# Two messages fit, and as much as may be read before it is reported: otherwise the largest could wait forever.
_HALF_BYTES = 2 * MOST_BYTES + 4 * _TELL_AFTER_BYTES
_ALIGNMENT = 64
# What is sent on the socket: a tag, and for a message its offset and its bytes.
_TOLD = struct.Struct("<QQQ")
# Python ignores the signal of a closed socket anyway; not every system has the flag.
_AT_ONCE = int(getattr(socket, "MSG_DONTWAIT", 0)) | int(getattr(socket, "MSG_NOSIGNAL", 0))
_WHOLE = int(getattr(socket, "MSG_WAITALL", 0))
#: Memory without a name, given to another process over a socket: Linux has it. Elsewhere messages go through the group.
_NEEDED = ((os, "memfd_create"), (socket, "send_fds"), (socket, "AF_UNIX"))
_READ = 0  # The tag of a report of how many messages were read.


class Arrival:
    """A posted receive, as work that can be waited for."""

    __slots__ = ("_pair", "is_here", "message", "num_bytes")

    def __init__(self, pair: "Pair", message: Tensor) -> None:
        self._pair, self.message, self.num_bytes = pair, message, message.nbytes
        self.is_here = False

    def wait(self, timeout: timedelta | None = None) -> None:  # noqa: ARG002 - a severed pair ends it
        """Wait for the message. Sends pending elsewhere may have to complete before it can arrive."""
        pair = self._pair
        while not self.is_here:
            if pair.behind:
                _listen_to_one({*pair.behind, pair})
            else:
                pair.listen()

    def fill(self, address: int, num_bytes: int) -> None:
        """Copy the message from its offset."""
        if num_bytes != self.num_bytes:
            raise RuntimeError(f"a message of {num_bytes} bytes came where one of {self.num_bytes} was expected")
        ctypes.memmove(self.message.data_ptr(), address, num_bytes)
        self.is_here = True


class Pair:
    """This rank's end of the memory and socket shared with another. `behind` has its pairs with pending sends."""

    def __init__(
        self, connection: socket.socket, memory: mmap.mmap, behind: "set[Pair]", *, writes_first_half: bool
    ) -> None:
        self._socket, self._memory, self.behind = connection, memory, behind
        self._bytes = (ctypes.c_char * len(memory)).from_buffer(memory)
        first = ctypes.addressof(self._bytes)
        self._out, self._in = (first, first + _HALF_BYTES) if writes_first_half else (first + _HALF_BYTES, first)
        self._room = _Room()
        #: Sent messages that did not fit yet, with their tags.
        self.pending: deque[tuple[Tensor, int]] = deque()
        self._wanted: dict[int, deque[Arrival]] = {}
        self._early: dict[int, deque[Tensor]] = {}
        self._num_read, self._num_read_bytes = 0, 0
        weakref.finalize(self, connection.close)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Tensor, tag: int) -> None:
        """Send a message, which lies in one piece. It may be written to again unless it is `pending` then."""
        if self.pending or not self._send(message, tag):
            self.pending.append((message.detach(), tag))
            self.behind.add(self)

    def wait(self, timeout: timedelta | None = None) -> None:  # noqa: ARG002 - as above
        """Wait until what is pending is sent."""
        while self.pending:
            _listen_to_one(self.behind)

    def flush(self) -> None:
        """Send what finds room now."""
        while self.pending and self._send(*self.pending[0]):
            self.pending.popleft()
        if not self.pending:
            self.behind.discard(self)

    def want(self, message: Tensor, tag: int) -> Arrival:
        """Set where the next message of this tag is to be copied."""
        arrival = Arrival(self, message)
        early = self._early.get(tag)
        if early:
            found = early.popleft()
            arrival.fill(found.data_ptr(), found.nbytes)
        else:
            self._wanted.setdefault(tag, deque()).append(arrival)
        return arrival

    def listen(self) -> None:
        """Wait for what the other rank tells next, and do what follows from it."""
        try:
            told = self._socket.recv(_TOLD.size, _WHOLE)
        except OSError as error:
            raise RuntimeError(f"the connection to a rank of this machine broke: {error}") from error
        if len(told) < _TOLD.size:
            raise RuntimeError("the connection to a rank of this machine was closed")
        tag, start, num_bytes = _TOLD.unpack(told)
        if tag == _READ:
            self._room.free(start)
            self.flush()
            return
        wanted = self._wanted.get(tag)
        if wanted:
            wanted.popleft().fill(self._in + start, num_bytes)
        else:
            early = torch.empty(num_bytes, dtype=torch.uint8)
            ctypes.memmove(early.data_ptr(), self._in + start, num_bytes)
            self._early.setdefault(tag, deque()).append(early)
        self._num_read += 1
        self._num_read_bytes += num_bytes
        if self._num_read_bytes >= _TELL_AFTER_BYTES or self._num_read >= _TELL_AFTER:
            self._tell_what_is_read()

    def _send(self, message: Tensor, tag: int) -> bool:
        """Whether there was room for a message, and for word of it."""
        num_bytes = message.nbytes
        start = self._room.take(num_bytes)
        if start is None:
            return False
        ctypes.memmove(self._out + start, message.data_ptr(), num_bytes)
        try:
            self._socket.send(_TOLD.pack(tag, start, num_bytes), _AT_ONCE)
        except BlockingIOError:
            self._room.give_back()
            return False
        except OSError as error:
            raise RuntimeError(f"the connection to a rank of this machine broke: {error}") from error
        return True

    def _tell_what_is_read(self) -> None:
        # If it cannot be told now, it is with the next; and who is gone needs no room any more.
        with contextlib.suppress(OSError):
            self._socket.send(_TOLD.pack(_READ, self._num_read, 0), _AT_ONCE)
            self._num_read, self._num_read_bytes = 0, 0

    def sever(self) -> None:
        """End the waits at both ends, from any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of socket and memory. What was sent can still be read at the other end."""
        self.pending.clear()
        self.behind.discard(self)
        self._socket.close()
        del self._bytes
        self._memory.close()


def _listen_to_one(pairs: Iterable[Pair]) -> None:
    """Wait for news of any of these, and send what they let through."""
    pairs = list(pairs)
    for pair in pairs:
        pair.flush()
    # With a limit: a socket that was full of what had been told does not say that there is room.
    readable, _, _ = select.select(pairs, [], [], 0.001)
    for pair in readable:
        pair.listen()


class _Room:
    """Which bytes of a half are taken. They are freed in the order in which they were taken."""

    def __init__(self) -> None:
        self._taken: deque[tuple[int, int]] = deque()

    def take(self, num_bytes: int) -> int | None:
        """Return the offset of this many free bytes; None if there are none. An empty half is filled from its warm
        start."""
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        taken, start = self._taken, 0
        if taken:
            oldest, (newest, end) = taken[0][0], taken[-1]
            if newest < oldest:
                start, limit = end, oldest
            elif end + size <= _HALF_BYTES:
                start, limit = end, _HALF_BYTES
            else:
                limit = oldest
            if start + size > limit:
                return None
        taken.append((start, start + size))
        return start

    def give_back(self) -> None:
        """Undo the last `take`."""
        self._taken.pop()

    def free(self, count: int) -> None:
        """Free what was taken first."""
        for _ in range(count):
            self._taken.popleft()


def meet(group: dist.ProcessGroup) -> dict[int, Pair]:
    """Find the ranks of a group that are on this machine. Every rank of the group calls this."""
    if group.size() == 1:
        return {}
    me, behind = group.rank(), set[Pair]()
    with contextlib.ExitStack() as stack:
        listener, address = _listen(stack, group.size())
        addresses = objects.gather(address, group)
        pairs: dict[int, Pair] = {}
        for rank, other in enumerate(addresses):
            if rank > me and address is not None and other is not None and other[0] == address[0]:
                pair = _call(me, other[1], behind)
                if pair is not None:
                    pairs[rank] = pair
        for called in objects.gather(sorted(pairs), group):
            if me in called:
                assert listener is not None, "a rank was called that does not listen"
                rank, pair = _answer(listener, behind)
                pairs[rank] = pair
    return pairs


def _listen(stack: contextlib.ExitStack, num_ranks: int) -> tuple[socket.socket | None, tuple[str, str] | None]:
    """Return a socket for other processes of this machine, and its address; None for both if that is impossible."""
    machine = Path("/proc/sys/kernel/random/boot_id")
    if not all(hasattr(*each) for each in _NEEDED) or not machine.exists():
        return None, None
    try:
        folder = tempfile.mkdtemp(prefix="shardwise-")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(f"{folder}/ranks")
        listener.listen(num_ranks)
    except OSError:  # No folder for temporary files, or one whose path is too long for a socket.
        return None, None
    return listener, (machine.read_text().strip(), f"{folder}/ranks")


def _call(me: int, path: str, behind: set[Pair]) -> Pair | None:
    """Call the rank that listens at a path, with memory for both; None if this process cannot see it."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    memory = -1
    try:
        memory = os.memfd_create("shardwise")
        os.ftruncate(memory, 2 * _HALF_BYTES)
        shared = mmap.mmap(memory, 2 * _HALF_BYTES)
        connection.connect(path)
        socket.send_fds(connection, [_TOLD.pack(me, 0, 0)], [memory])
        return Pair(connection, shared, behind, writes_first_half=True)
    except OSError:
        connection.close()
        return None
    finally:
        if memory >= 0:
            os.close(memory)


def _answer(listener: socket.socket, behind: set[Pair]) -> tuple[int, Pair]:
    """Take the next call: who it is, and the pair."""
    connection, _ = listener.accept()
    told, (memory,), _, _ = socket.recv_fds(connection, _TOLD.size, 1)
    try:
        return _TOLD.unpack(told)[0], Pair(
            connection, mmap.mmap(memory, 2 * _HALF_BYTES), behind, writes_first_half=False
        )
    finally:
        os.close(memory)
