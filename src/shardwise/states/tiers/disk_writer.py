"""Gradients on their way to files: into pinned memory by a copy stream, from there into the mapped file by a thread.

    device    [ g ]
    pinned        [ 0 ] [ 1 ] [ 2 ] [ 3 ]     in turn
    mapped              [ gradients of the block ]

A GPU copies straight into mapped memory only while the host waits for it. So it copies into a buffer, which is written
to again when the thread has emptied it.
"""

from torch import Tensor

from shardwise.dataflow.machine import Machine
from shardwise.dataflow.streams import Event, ThreadStream
from shardwise.errors import ShardwiseError
from shardwise.states.tiers.copy_streams import CopyStreams
from shardwise.states.tiers.pinned_ring import PinnedRing

_NUM_BUFFERS = 4


class DiskWriter:
    """Copies gradients into memory of files. None is larger than `most_bytes`."""

    def __init__(self, machine: Machine, most_bytes: int) -> None:
        # An error in it is the machine's, as one in reading is.
        self._stream = ThreadStream("gradients to disk", machine.failures)
        self._buffers = PinnedRing(machine.pinned, _NUM_BUFFERS, most_bytes)

    def write(self, target: Tensor, gradient: Tensor, copies: CopyStreams) -> tuple[Event, Event]:
        """Have what is computed by now written; return when it has left the device, and when it has arrived."""
        buffer = self._buffers.take()
        staged = buffer.memory[: gradient.nbytes].view(gradient.dtype)
        left = copies.to_host(staged, gradient, buffer.free)
        arrived = self._stream.put(lambda: target.copy_(staged), [left], _blame)
        buffer.free = [arrived]
        return left, arrived

    def close(self) -> None:
        """End the thread once it has written everything."""
        self._stream.close()


def _blame(error: Exception) -> Exception:
    return ShardwiseError(f"gradients could not be written to disk: {error}", remedy="a disk that can be written to")
