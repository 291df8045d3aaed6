"""Weights on disk that can be trained: a file of our own for each block, mapped into memory and written to.

    file      [ weights | gradients ]         reserved whole before it is used, and without a name: nothing is left
    mapped      parameters  their grad         pages come and go as the kernel likes; what is written is written back
    pinned    [ 3 ] [ 7 ] [ 11 ]              read ahead of their use, as blocks of a checkpoint are (`disk.py`)

The parameters are the mapped memory, so that an optimizer updates them where they are, in the order of its own. What is
read from the file is what was written to the mapping: they are the same pages.
"""

import os
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor

from shardwise.dataflow.buffers import reserve_file
from shardwise.errors import ShardwiseError
from shardwise.units import format_bytes

_PAGE_BYTES = 4096


class ScratchFile:
    """A file for the weights of one block and for their gradients."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self._folder, self._num_bytes = folder, num_bytes
        pages = -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
        memory, self.file = _make(folder, 2 * pages)
        weakref.finalize(self, os.close, self.file)
        self.weights = memory[:num_bytes]
        self._gradients: Tensor | None = memory[pages : pages + num_bytes]

    def take_memory(self) -> Tensor:
        """Memory for the gradients of the block. Those that are added to others take a file of their own."""
        found, self._gradients = self._gradients, None
        if found is not None:
            return found
        memory, file = _make(self._folder, self._num_bytes)
        os.close(file)
        return memory


def _make(folder: Path, num_bytes: int) -> tuple[Tensor, int]:
    """A file of so many bytes as memory, and open. The mapping keeps it alive, its name is gone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file, name = tempfile.mkstemp(prefix="shardwise-", suffix=".scratch", dir=folder)
    except OSError as error:
        raise _refused(folder, num_bytes, error) from error
    try:
        reserve_file(file, max(num_bytes, 1))
        return torch.from_file(name, shared=True, size=num_bytes, dtype=torch.uint8), file
    except (OSError, RuntimeError) as error:
        os.close(file)
        raise _refused(folder, num_bytes, error) from error
    finally:
        Path(name).unlink()


def _refused(folder: Path, num_bytes: int, error: Exception) -> ShardwiseError:
    return ShardwiseError(
        f"{format_bytes(num_bytes)} for weights that are trained cannot be had in {folder}:"
        f" {getattr(error, 'strerror', None) or error}",
        remedy="a folder on a disk with room for what the host has none for, or a larger budget for the host",
    )
