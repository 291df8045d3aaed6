"""Blocks whose weights stay in files: safetensors, memory-mapped, read into pinned memory ahead of their use.

    disk      [ 3 | 7 | 11 | ... ]        files of a checkpoint, or written here
    pinned    [ 3 ] [ 7 ] [ 11 ]          as many buffers as blocks are on their way
    device    [ 3 ] [ 7 ] [ 11 ]

A thread reads, one block after the other; a buffer is written again when its copy to the device is done.
"""

from collections.abc import Mapping, Sequence
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
from shardwise.dataflow.streams import Mark, ThreadStream
from shardwise.errors import ShardwiseError
from shardwise.runtime.streaming.block import Block


class Record(NamedTuple):
    """Where the weights of a parameter are written."""

    path: Path
    name: str


#: For each parameter of a block that is on disk.
Records = Mapping[nn.Parameter, Record]


class _Buffer:
    """Pinned memory for one block, and when it was last read by a copy."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.last: Mark | None = None


class Shelf:
    """Reads blocks from their files, as many ahead as it has buffers."""

    def __init__(self, records: Sequence[Records], num_bytes: int, num_buffers: int, machine: Machine) -> None:
        self._records = {parameter: record for each in records for parameter, record in each.items()}
        self._files: dict[Path, Any] = {}
        self._machine = machine
        # An error in it is the machine's: what is computed after it would be rubbish.
        self._stream = ThreadStream("weights from disk", machine.failures)
        self._buffers = cycle([_Buffer(machine.pinned((num_bytes,), torch.uint8)) for _ in range(num_buffers)])
        self._current: _Buffer | None = None

    def read(self, block: Block) -> tuple[Tensor, Mark]:
        """Have a block read into memory that is the caller's until `sent`; return it, and when it has the weights."""
        self._current = buffer = next(self._buffers)
        memory = buffer.memory[: block.num_bytes]
        after = [] if buffer.last is None else [buffer.last]
        return memory, self._stream.put(partial(self._read, block.views(memory)), after, _blame)

    def sent(self, mark: Mark) -> None:
        """What was read last has been copied to the device once a mark is reached."""
        assert self._current is not None, "nothing was read"
        self._current.last = mark

    def weights(self, parameter: nn.Parameter) -> Tensor:
        """The weights of a parameter, as they lie in their file: read when they are used."""
        path, name = self._records[parameter]
        if path not in self._files:
            self._files[path] = safe_open(path, "pt")  # It is a map of the file, and stays open.
        found: Tensor = self._files[path].get_tensor(name)
        return found

    def close(self) -> None:
        """End the thread. Files stay open as long as somebody uses weights in them."""
        self._stream.close()
        self._files.clear()

    def _read(self, views: Mapping[nn.Parameter, Tensor]) -> None:
        for parameter, view in views.items():
            view.copy_(self.weights(parameter))


def find_records(
    folder: Path, blocks: Sequence[Sequence[nn.Parameter]], names: Mapping[nn.Parameter, Sequence[str]]
) -> list[Records]:
    """Where each parameter of these blocks is on disk: in the safetensors of a folder, or in files that are written."""
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        return _write(folder, blocks, names)
    written: dict[str, Path] = {}
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                written.update(dict.fromkeys(file.keys(), path))
        except (SafetensorError, OSError) as error:
            raise ShardwiseError(f"{path} cannot be read: {error}", remedy="a whole file in its place") from error
    wanted = [parameter for block in blocks for parameter in block]
    lacking = [names[each][0] for each in wanted if not any(name in written for name in names[each])]
    if lacking:
        raise ShardwiseError(
            f"{folder} lacks {len(lacking)} of the {len(wanted)} tensors of the blocks that are to stay on disk,"
            f" {lacking[0]} for one",
            remedy="a folder that has all of them, or an empty one: then they are written into it",
        )
    return [{each: _checked(each, written, names[each]) for each in block} for block in blocks]


def _checked(parameter: nn.Parameter, written: Mapping[str, Path], names: Sequence[str]) -> Record:
    name = next(name for name in names if name in written)
    with safe_open(written[name], "pt") as file:
        shape = tuple(file.get_slice(name).get_shape())
    if shape != tuple(parameter.shape):
        raise ShardwiseError(
            f"{name} is {list(shape)} in {written[name]} and {list(parameter.shape)} in the module",
            remedy="the checkpoint of this very model",
        )
    return Record(written[name], name)


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
        found.append({each: Record(path, names[each][0]) for each in block})
    return found


def _blame(error: Exception) -> Exception:
    return ShardwiseError(
        f"weights could not be read from disk: {error}", remedy="the file back in its place, and the run again"
    )
