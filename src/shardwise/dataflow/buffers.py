"""How a place gets its memory: a GPU's, the host's pinned, a file on a disk."""

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

# Below this torch's own pinned memory is used, which above would be rounded up to a power of two. A user's tensor below
# this may share a page with others, so it is left as it is.
LEAST_PINNED_BYTES = 2**20

#: Makes a buffer of so many bytes.
Allocate = Callable[[int], Tensor]
#: Lets a buffer go.
Free = Callable[[Tensor], None]


def device_memory(device: torch.device) -> tuple[Allocate, Free]:
    """A GPU's memory, or plain memory for a CPU place."""
    if device.type == "cpu":
        return lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8), _let_go
    # Torch hands memory out again in the order of the stream that asks. This one is nobody else's, and what it gives
    # back is over on all streams: so a new buffer may be written by any stream at once.
    side = new_stream(device)

    def allocate(num_bytes: int) -> Tensor:
        with torch.cuda.stream(side):
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    return allocate, _let_go


def host_memory(*, is_pinned: bool) -> tuple[Allocate, Free]:
    """The host's memory; pinned where there is a GPU, so that copies run beside everything else."""
    if not is_pinned:
        return device_memory(torch.device("cpu"))

    def allocate(num_bytes: int) -> Tensor:
        if num_bytes < LEAST_PINNED_BYTES:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        # Zeros, so that all cores touch its pages: pinning alone does that with one, at 1 GB a second.
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
    """Pin the memory that a tensor lies in. Returns whether that went well; a read-only mapping cannot be pinned."""
    storage = tensor.untyped_storage()
    status = torch.cuda.cudart().cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0)  # type: ignore[no-untyped-call]
    if int(status) == 0:
        return True
    # CUDA keeps its last error until somebody asks, and would else tell it to the next kernel.
    with suppress(RuntimeError):
        torch.empty(1, device="cuda").fill_(0)
    return False


def unpin(tensor: Tensor) -> None:
    """Undo `pin`."""
    torch.cuda.cudart().cudaHostUnregister(tensor.untyped_storage().data_ptr())  # type: ignore[no-untyped-call]


#: Zeros that are written at a time, where a file cannot be reserved by a word.
_ZERO_BYTES = 2**20


def reserve_file(descriptor: int, num_bytes: int) -> None:
    """Take a file's bytes from the disk now. Mapped memory that has none when it is written ends the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
        return
    # macOS has no such call, and a file that is only made longer has holes: zeros are written.
    zeros = bytes(min(num_bytes, _ZERO_BYTES))
    left = num_bytes
    while left > 0:
        left -= os.write(descriptor, zeros[:left])


def disk_memory(folder: Path | None) -> tuple[Allocate, Free]:
    """Files, mapped into memory. Each is reserved whole before it is used: a disk that fills says so in time."""

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
            # The mapping keeps the file alive, and nothing is left behind however the process ends.
            Path(name).unlink()

    return allocate, _let_go


def _let_go(storage: Tensor) -> None:
    """The memory goes with the last name for it."""
    del storage
