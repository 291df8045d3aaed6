"""Messages between stages: their values, the layout of tensors in one buffer, and the header that describes it."""

import pickle
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

#: Type, shape and `requires_grad` of each tensor.
Description = tuple[tuple[torch.dtype, torch.Size, bool], ...]

#: Bytes in the first part of a header: enough for a dozen tensors.
HEADER_LENGTH = 1024
# Every tensor starts at a multiple of this many bytes, aligned for vector instructions.
_ALIGNMENT = 64


class Key(NamedTuple):
    """The value of a message: an activation (`F`) or a gradient (`B`), from rank to rank and from stage to stage."""

    source: int
    target: int
    kind: str
    maker: int
    reader: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.reader}RECV_{self.kind}{self.microbatch}<{self.maker}"

    @property
    def sending(self) -> str:
        """The instruction at the other end."""
        return f"{self.maker}SEND_{self.kind}{self.microbatch}>{self.reader}"


def describe(tensors: list[Tensor]) -> Description:
    """Return what the receiver must know of tensors before it can receive them."""
    return tuple((tensor.dtype, tensor.shape, tensor.requires_grad) for tensor in tensors)


def encode(description: Description) -> Tensor:
    """Return a header: its length in bytes and the pickled description, padded to at least `HEADER_LENGTH`."""
    pickled = pickle.dumps(description)
    told = (len(pickled) + 8).to_bytes(8, "little") + pickled
    return torch.frombuffer(bytearray(told.ljust(HEADER_LENGTH, b"\0")), dtype=torch.uint8)


def length_of(header: Tensor) -> int:
    """Return the length of a header in bytes, from its first part."""
    return int(header[:8].view(torch.int64))


def decode(header: Tensor) -> Description:
    """Return the description in a header made by `encode`."""
    description: Description = pickle.loads(header[8:].numpy().tobytes())
    return description


class Layout:
    """The offset of each tensor in the message. A message of one tensor is that tensor."""

    def __init__(self, description: Description) -> None:
        self.description = description
        sizes = [shape.numel() * dtype.itemsize for dtype, shape, _ in description]
        starts = accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes[:-1]), initial=0)
        self._spans = [(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        self._strides = [torch.empty(shape, device="meta").stride() for _, shape, _ in description]
        self.num_bytes = self._spans[-1][1] if any(sizes) else 0

    def allocate(self, device: torch.device, *, pinned: bool = False) -> Tensor:
        """Allocate a message. From and to pinned host memory, a GPU copies while it computes."""
        if len(self.description) == 1:
            dtype, shape, _ = self.description[0]
            return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)
        return torch.empty(self.num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)

    def pack(self, tensors: list[Tensor]) -> Tensor | None:
        """Return the message, or None if these tensors do not match the description.

        A single contiguous tensor is not copied, and stays in its autograd graph.
        """
        if len(tensors) == 1 == len(self.description):
            (tensor,), ((dtype, shape, wants_gradient),) = tensors, self.description
            if tensor.dtype is not dtype or tensor.shape != shape or tensor.requires_grad is not wants_gradient:
                return None
            tensor = _written_out(tensor)
            return tensor if tensor.is_contiguous() else tensor.contiguous()
        if describe(tensors) != self.description:
            return None
        buffer = torch.empty(self.num_bytes, dtype=torch.uint8, device=tensors[0].device if tensors else None)
        for tensor, (start, end) in zip(tensors, self._spans, strict=True):
            buffer[start:end].copy_(_written_out(tensor).detach().contiguous().view(-1).view(torch.uint8))
        return buffer

    def unpack(self, message: Tensor) -> list[Tensor]:
        """Return the tensors in a message, without a copy."""
        if len(self.description) == 1:
            return [message.requires_grad_(self.description[0][2])]
        storage = message.untyped_storage()
        tensors = []
        for (dtype, shape, wants_gradient), (start, _), strides in zip(
            self.description, self._spans, self._strides, strict=True
        ):
            # Not a view: views share a version counter, and autograd would treat a write to one as a write to all.
            tensor = torch.empty(0, dtype=dtype, device=message.device)
            tensor.set_(storage, start // dtype.itemsize, shape, strides)
            tensors.append(tensor.requires_grad_(wants_gradient))
        return tensors


def _written_out(tensor: Tensor) -> Tensor:
    """Return a tensor with conjugation and negation applied: they are lazy bits of a tensor, which no message has."""
    return tensor.resolve_conj().resolve_neg()
