"""Gradients on their way to files: into pinned memory by the link, and from there into the mapped file by a thread.

    device    [ g ]
    pinned        [ 0 ] [ 1 ] [ 2 ] [ 3 ]     in turn
    mapped              [ gradients of the block ]

A GPU copies straight into mapped memory only while the host waits for it. So it copies into a buffer, which is written
to again when the thread has emptied it.
"""

from itertools import cycle

import torch
from torch import Tensor

from shardwise.dataflow.machine import Machine
from shardwise.dataflow.streams import Event, ThreadStream
from shardwise.errors import ShardwiseError
from shardwise.states.tiers.host_link import Link

_NUM_BUFFERS = 4


class _Buffer:
    """Pinned memory for one gradient, and when the last one has left it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.last: Event | None = None


class Writer:
    """Copies gradients into memory of files. None is larger than `most_bytes`."""

    def __init__(self, machine: Machine, most_bytes: int) -> None:
        # An error in it is the machine's, as one in reading is.
        self._stream = ThreadStream("gradients to disk", machine.failures)
        self._buffers = cycle([_Buffer(machine.pinned((most_bytes,), torch.uint8)) for _ in range(_NUM_BUFFERS)])

    def write(self, target: Tensor, gradient: Tensor, link: Link) -> tuple[Event, Event]:
        """Have what is computed by now written; return when it has left the device, and when it has arrived."""
        buffer = next(self._buffers)
        staged = buffer.memory[: gradient.nbytes].view(gradient.dtype)
        left = link.outward(staged, gradient, [] if buffer.last is None else [buffer.last])
        buffer.last = self._stream.put(lambda: target.copy_(staged), [left], _blame)
        return left, buffer.last

    def close(self) -> None:
        """End the thread once it has written everything."""
        self._stream.close()


def _blame(error: Exception) -> Exception:
    return ShardwiseError(f"gradients could not be written to disk: {error}", remedy="a disk that can be written to")
