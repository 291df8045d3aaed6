"""Blocks whose weights stay in files: safetensors, read into pinned memory ahead of use; and gradients written to disk.

    disk      [ 3 | 7 | 11 | ... ]        files of a checkpoint, or written here
    pinned    [ 3 ] [ 7 ] [ 11 ]          as many buffers as blocks are on their way
    device    [ 3 ] [ 7 ] [ 11 ]

Blocks are read one after the other, each by several threads at once, directly into its buffer. A buffer is reused when
its copy to the device is done.

    device    [ g ]
    pinned        [ 0 ] [ 1 ] [ 2 ] [ 3 ]     in turn
    mapped              [ gradients of the block ]

Gradients go the other way. A GPU copies directly into mapped memory only while the host waits for it. So it copies into
a buffer, which is reused when a thread has emptied it.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwise.dataflow.machine import Machine
from shardwise.dataflow.streams import Event, ThreadStream
from shardwise.errors import ShardwiseError
from shardwise.states.tiers.copy_streams import CopyStreams
from shardwise.states.tiers.streamed_block import StreamedBlock

#: The bytes that one thread reads at a time, and the number of threads.
_PART_BYTES = 8 * 2**20
_NUM_READERS = 8
_NUM_WRITE_BUFFERS = 4


class Record(NamedTuple):
    """The place of a parameter's weights on disk: a tensor of a file, and its bytes there."""

    path: Path
    name: str
    start: int
    dtype: torch.dtype
    shape: torch.Size


#: For each parameter of a block on disk.
Records = Mapping[nn.Parameter, Record]


class PinnedBuffer:
    """Pinned memory for one copy at a time, and events after which it may be written again."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.free: list[Event] = []


def _pinned_ring(machine: Machine, count: int, num_bytes: int) -> Iterator[PinnedBuffer]:
    """Yield buffers in turn. The user of a buffer sets with `free` when it may be written again."""
    return cycle([PinnedBuffer(machine.pinned((num_bytes,), torch.uint8)) for _ in range(count)])


class DiskReader:
    """Reads blocks from their files, as many ahead as it has buffers."""

    def __init__(self, records: Sequence[Records], num_bytes: int, num_buffers: int, machine: Machine) -> None:
        self._records = {parameter: record for each in records for parameter, record in each.items()}
        self._maps: dict[Path, Any] = {}
        self._files: dict[Path, int] = {}
        # An error here fails the whole machine: later computation would use wrong values.
        self._stream = ThreadStream("weights from disk", machine.failures)
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="shardwise disk")
        self._buffers = _pinned_ring(machine, num_buffers, num_bytes)

    def fetch(self, block: StreamedBlock, copies: CopyStreams, after: Sequence[Event]) -> Event:
        """Read a block, and copy it to the device after some events."""
        buffer = next(self._buffers)
        memory = buffer.memory[: block.num_bytes]
        read = self._stream.put(partial(self._read, block, memory), buffer.free, _blame_reading)
        arrives = copies.to_device(block.device, memory, [*after, read])
        buffer.free = [arrives]
        return arrives

    def weights(self, parameter: nn.Parameter) -> Tensor:
        """Return the weights of a parameter as a mapping of their file, which is read on use."""
        record = self._records[parameter]
        if record.path not in self._maps:
            self._maps[record.path] = safe_open(record.path, "pt")
        found: Tensor = self._maps[record.path].get_tensor(record.name)
        return found

    def close(self) -> None:
        """End the threads. Files stay mapped as long as their weights are in use."""
        self._stream.close()
        self._readers.shutdown()
        self._maps.clear()
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _read(self, block: StreamedBlock, memory: Tensor) -> None:
        if block.scratch is not None:
            parts = list(_parts_of(block.scratch.file, 0, memory))
        else:
            views = block.views(memory)
            parts = [part for parameter, view in views.items() for part in self._parts(parameter, view)]
        for done in [self._readers.submit(part) for part in parts]:
            done.result()

    def _parts(self, parameter: nn.Parameter, view: Tensor) -> Iterator[Callable[[], object]]:
        """Yield functions that read a parameter's weights, in parts that can run concurrently."""
        record = self._records[parameter]
        if record.dtype != view.dtype:
            yield lambda: view.copy_(self.weights(parameter))
            return
        yield from _parts_of(self._file(record.path), record.start, view.view(-1).view(torch.uint8))

    def _file(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
        return self._files[path]


class DiskWriter:
    """Copies gradients into memory of files. None is larger than `most_bytes`."""

    def __init__(self, machine: Machine, most_bytes: int) -> None:
        # An error here fails the whole machine, as one in reading does.
        self._stream = ThreadStream("gradients to disk", machine.failures)
        self._buffers = _pinned_ring(machine, _NUM_WRITE_BUFFERS, most_bytes)

    def write(self, target: Tensor, gradient: Tensor, copies: CopyStreams) -> tuple[Event, Event]:
        """Write what is computed by now; return events for when it has left the device, and when it has arrived."""
        buffer = next(self._buffers)
        staged = buffer.memory[: gradient.nbytes].view(gradient.dtype)
        left = copies.to_host(staged, gradient, buffer.free)
        arrived = self._stream.put(lambda: target.copy_(staged), [left], _blame_writing)
        buffer.free = [arrived]
        return left, arrived

    def close(self) -> None:
        """End the thread once it has written everything."""
        self._stream.close()


def _parts_of(file: int, first: int, memory: Tensor) -> Iterator[Callable[[], object]]:
    """Yield functions that read a range of a file, in parts."""
    there = memory.numpy().data
    for start in range(0, len(there), _PART_BYTES):
        yield partial(_fill, file, first + start, there[start : start + _PART_BYTES])


def _fill(file: int, start: int, memory: memoryview) -> None:
    """Read bytes of a file into memory, without holding Python's GIL."""
    done = 0
    while done < len(memory):
        count = _read_at(file, start + done, memory[done:])
        if count == 0:
            raise EOFError(f"the file ends {len(memory) - done} bytes too early")
        done += count


def _read_at(file: int, start: int, memory: memoryview) -> int:
    """Read from an offset of a file into memory; return the number of bytes, which may be less than requested."""
    if hasattr(os, "preadv"):
        return os.preadv(file, [memory], start)
    found = os.pread(file, len(memory), start)  # For systems that cannot read into existing memory: one more copy.
    memory[: len(found)] = found
    return len(found)


def find_records(
    folder: Path, blocks: Sequence[Sequence[nn.Parameter]], names: Mapping[nn.Parameter, Sequence[str]]
) -> list[Records]:
    """Return where each parameter of these blocks is on disk: in a folder's safetensors, or in files that are
    written."""
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        return _write(folder, blocks, names)
    written = {name: record for path in files for name, record in _records_in(path).items()}
    wanted = [parameter for block in blocks for parameter in block]
    lacking = [names[each][0] for each in wanted if not any(name in written for name in names[each])]
    if lacking:
        raise ShardwiseError(
            f"{folder} lacks {len(lacking)} of the {len(wanted)} tensors of the blocks that stay on disk,"
            f" such as {lacking[0]}",
            remedy="a folder that has all of them, or an empty one: then they are written into it",
        )
    found = {each: next(written[name] for name in names[each] if name in written) for each in wanted}
    for parameter, record in found.items():
        if record.shape != parameter.shape:
            raise ShardwiseError(
                f"{record.name} is {list(record.shape)} in {record.path} and {list(parameter.shape)} in the module",
                remedy="the checkpoint of this model",
            )
    return [{each: found[each] for each in block} for block in blocks]


def _records_in(path: Path) -> dict[str, Record]:
    """Return the place of each tensor in a file: after 8 bytes with the header's length, and the header."""
    try:
        with safe_open(path, "pt") as mapped:  # Checks that the file is whole. Tensors are mapped, so nothing is read.
            tensors = {name: mapped.get_tensor(name) for name in mapped.keys()}  # noqa: SIM118 - it is no dict
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError) as error:
        raise ShardwiseError(f"{path} cannot be read: {error}", remedy="a whole file in its place") from error
    starts = {name: 8 + length + header[name]["data_offsets"][0] for name in tensors}
    return {name: Record(path, name, starts[name], each.dtype, each.shape) for name, each in tensors.items()}


def _write(
    folder: Path, blocks: Sequence[Sequence[nn.Parameter]], names: Mapping[nn.Parameter, Sequence[str]]
) -> list[Records]:
    found: list[Records] = []
    for number, block in enumerate(blocks):
        path = folder / f"block-{number}.safetensors"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file({names[each][0]: each.detach().cpu().contiguous() for each in block}, path)
        except (SafetensorError, OSError) as error:
            for written in (path, *(record.path for each in found for record in each.values())):
                with suppress(OSError):
                    written.unlink()
            raise ShardwiseError(
                f"a block's weights cannot be written to {path}: {error}", remedy="another folder, with room for them"
            ) from error
        records = _records_in(path)
        found.append({each: records[names[each][0]] for each in block})
    return found


def _blame_reading(error: Exception) -> Exception:
    return ShardwiseError(f"weights could not be read from disk: {error}", remedy="restore the file, and run again")


def _blame_writing(error: Exception) -> Exception:
    return ShardwiseError(f"gradients could not be written to disk: {error}", remedy="a disk that can be written to")
