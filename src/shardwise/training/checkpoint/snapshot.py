"""Snapshots: copies of parts, made between two steps, from which a checkpoint is written.

    training   step | copy | step | step ...        a GPU with free memory copies within it, in milliseconds
    writer            `-- to the host, chunk by chunk, and into the file --'

Without enough free memory the copy goes to pinned host memory, and the next step waits for it.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.training.checkpoint.boxes import Box
from shardwise.training.checkpoint.index import bytes_of
from shardwise.training.checkpoint.parts import Part

#: The size of one device-to-host transfer: large enough to hide its latency, and far smaller than a model.
_CHUNK_BYTES = 64 * 2**20
#: The share of a GPU's memory left free, besides the copy and the peak of the steps, because of fragmentation.
_MARGIN = 0.05


class Snapshot:
    """The parts of one checkpoint at a time. Host memory is reused for the next one."""

    def __init__(self) -> None:
        self.parts: Sequence[Part] = ()
        self._on_host: dict[tuple[str, Box], Tensor] = {}
        self._copied: torch.cuda.Event | None = None
        #: The peak of allocated memory before the first copy.
        self._most: int | None = None

    def take(self, parts: Iterable[Part]) -> None:
        """Copy parts. GPU copies are asynchronous, but on the stream of the steps, so they precede any update."""
        given = list(parts)
        stays = self._find_room(given)
        try:
            copies = [self._copy(part, stays=stays) for part in given]
        except torch.cuda.OutOfMemoryError:
            copies = [self._copy(part, stays=False) for part in given]
            stays = False
        self.parts = copies
        kept = set() if stays else {(part.entry, part.box) for part in given}
        self._on_host = {key: memory for key, memory in self._on_host.items() if key in kept}
        if any(part.numbers.is_cuda for part in given):
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
            if not stays:
                self._copied.synchronize()

    def wait(self) -> None:
        """Wait until the copies are complete. The writer's thread calls this."""
        if self._copied is not None:
            self._copied.synchronize()

    def release(self) -> None:
        """Release the GPU memory of the copies, after they are written."""
        self.parts = ()

    def _find_room(self, parts: Sequence[Part]) -> bool:
        """Return whether the copies fit on the GPU beside the next steps."""
        on_gpu = [part.numbers for part in parts if part.numbers.is_cuda]
        if not on_gpu:
            return False
        device = on_gpu[0].device
        held = torch.cuda.memory_allocated(device)
        if self._most is None:
            self._most = torch.cuda.max_memory_allocated(device)
        free, total = torch.cuda.mem_get_info(device)
        unused = free + torch.cuda.memory_reserved(device) - held
        needed = sum(each.nbytes for each in on_gpu)
        return needed + max(0, self._most - held) + _MARGIN * total < unused

    def _copy(self, part: Part, *, stays: bool) -> Part:
        source = part.numbers.detach()
        if stays and source.is_cuda:
            return part._replace(numbers=source.clone(memory_format=torch.contiguous_format))
        key = (part.entry, part.box)
        memory = self._on_host.get(key)
        if memory is None or memory.dtype != source.dtype:
            memory = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            self._on_host[key] = memory
        memory.copy_(source, non_blocking=True)
        return part._replace(numbers=memory)


class Chunks:
    """The bytes of tensors in pieces. GPU tensors pass through pinned memory, on a stream of their own."""

    def __init__(self) -> None:
        self._stage: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    def of(self, numbers: Tensor) -> Iterator[Any]:
        """Yield pieces, each valid until the next one."""
        if not numbers.is_cuda:
            yield bytes_of(numbers)
            return
        if self._stage is None or self._stream is None:
            self._stage = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
            self._stream = torch.cuda.Stream(numbers.device)  # type: ignore[no-untyped-call]
        flat = numbers.detach().contiguous().view(-1).view(torch.uint8)
        for start in range(0, len(flat), _CHUNK_BYTES):
            piece = flat[start : start + _CHUNK_BYTES]
            here = self._stage[: len(piece)]
            with torch.cuda.stream(self._stream):
                here.copy_(piece, non_blocking=True)
            self._stream.synchronize()
            yield here.numpy().data
