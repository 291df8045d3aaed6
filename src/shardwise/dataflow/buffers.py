"""Allocators of the places: GPU memory, pinned host memory, files on a disk."""

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from shardwise.dataflow.cuda import new_stream
from shardwise.errors import ShardwiseError
from shardwise.units import format_bytes

# Below this size torch's own pinned allocator is used; above it, that allocator would round up to a power of two. A
# user's tensor below this size may share a page with other data, so it is not pinned.
LEAST_PINNED_BYTES = 2**20

#: Makes a buffer of this many bytes.
Allocate = Callable[[int], Tensor]
#: Lets a buffer go.
Free = Callable[[Tensor], None]


def device_memory(device: torch.device) -> tuple[Allocate, Free]:
    """Return the allocator of a GPU's memory, or of plain memory for a CPU place."""
    if device.type == "cpu":
        return lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8), _let_go
    # Torch's caching allocator reuses memory in the order of the stream that allocates. No other work runs on this side
    # stream, and a buffer is freed only after all streams are done with it. So any stream may write a new one at once.
    side = new_stream(device)

    def allocate(num_bytes: int) -> Tensor:
        with torch.cuda.stream(side):
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    return allocate, _let_go


def host_memory(*, is_pinned: bool) -> tuple[Allocate, Free]:
    """Return the allocator of host memory, pinned where there is a GPU so that copies are asynchronous."""
    if not is_pinned:
        return device_memory(torch.device("cpu"))

    def allocate(num_bytes: int) -> Tensor:
        if num_bytes < LEAST_PINNED_BYTES:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        # Zero it so that all cores touch its pages: pinning alone faults them in on one core, at 1 GB a second.
        storage = torch.empty(num_bytes, dtype=torch.uint8).zero_()
        if not pin(storage):
            raise ShardwiseError(
                f"{format_bytes(num_bytes)} of host memory cannot be pinned", remedy='a budget for "host", or less data'
            )
        return storage

    def free(storage: Tensor) -> None:
        if storage.numel() >= LEAST_PINNED_BYTES:
            unpin(storage)

    return allocate, free


def pin(tensor: Tensor) -> bool:
    """Pin the memory of a tensor. Returns whether that succeeded; a read-only mapping cannot be pinned."""
    storage = tensor.untyped_storage()
    status = torch.cuda.cudart().cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0)  # type: ignore[no-untyped-call]
    if int(status) == 0:
        return True
    # CUDA keeps its last error until it is queried, and would otherwise report it at the next kernel launch.
    with suppress(RuntimeError):
        torch.empty(1, device="cuda").fill_(0)
    return False


def unpin(tensor: Tensor) -> None:
    """Undo `pin`."""
    torch.cuda.cudart().cudaHostUnregister(tensor.untyped_storage().data_ptr())  # type: ignore[no-untyped-call]


#: Bytes of zeros per write, on systems that cannot preallocate a file.
_ZERO_BYTES = 2**20


def reserve_file(descriptor: int, num_bytes: int) -> None:
    """Allocate a file's blocks on the disk now: writing to a mapped page without a block would kill the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
        return
    # macOS has no `posix_fallocate`, and a file that was only extended has holes. So zeros are written.
    zeros = bytes(min(num_bytes, _ZERO_BYTES))
    left = num_bytes
    while left > 0:
        left -= os.write(descriptor, zeros[:left])


def disk_memory(folder: Path | None) -> tuple[Allocate, Free]:
    """Return the allocator of files mapped into memory. Each file is allocated in full first, so a full disk raises."""

    def allocate(num_bytes: int) -> Tensor:
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        descriptor, name = tempfile.mkstemp(prefix="shardwise-", suffix=".spill", dir=folder)
        try:
            reserve_file(descriptor, num_bytes)
            return torch.from_file(name, shared=True, size=num_bytes, dtype=torch.uint8)
        except OSError as error:
            raise ShardwiseError(
                f"the disk has no room for {format_bytes(num_bytes)} in {Path(name).parent}: {error.strerror}",
                remedy="Machine(disk=FOLDER) on a larger disk, or a budget for the disk",
            ) from None
        finally:
            os.close(descriptor)
            # The mapping keeps the file alive after the unlink, and nothing is left behind however the process ends.
            Path(name).unlink()

    return allocate, _let_go


def _let_go(storage: Tensor) -> None:
    """Do nothing: the memory is freed with the last reference to it."""
    del storage
