"""Where a weight of ours is among the tensors of a file: boxes, with dims in another order.

An expert's matrix, [out, in] in the file, is one layer of our [experts, in, out]; GPT-2's queries are a third of the
columns of a matrix that is transposed. One description serves reading, writing, and reading a part.
"""

from dataclasses import dataclass

from torch import Tensor

#: One slice per dim, from start to stop.
Region = tuple[slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of our weight, and its place in a tensor of a file.

    `dims[i]` is the dim of ours that is dim i there. Our other dims have size 1 in the box.
    """

    tensor: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    dims: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def end_there(self) -> tuple[int, ...]:
        """The end of the box in the tensor."""
        return tuple(offset + self.size[dim] for offset, dim in zip(self.offset, self.dims, strict=True))

    def find_overlap(self, region: Region) -> "tuple[Region, Region] | None":
        """Return the part of a region of our weight in this box: its slices in the region, and in the tensor."""
        starts, stops = [], []
        for start, size, asked in zip(self.start, self.size, region, strict=True):
            starts.append(max(start, asked.start))
            stops.append(min(start + size, asked.stop))
            if starts[-1] >= stops[-1]:
                return None
        here = tuple(
            slice(start - asked.start, stop - asked.start)
            for start, stop, asked in zip(starts, stops, region, strict=True)
        )
        there = tuple(
            slice(starts[dim] - self.start[dim] + offset, stops[dim] - self.start[dim] + offset)
            for offset, dim in zip(self.offset, self.dims, strict=True)
        )
        return here, there

    def to_ours(self, part: Tensor) -> Tensor:
        """Return a part of the tensor with dims in our order."""
        order = sorted(range(len(self.dims)), key=lambda there: self.dims[there])
        turned = part.permute(order)
        for dim in range(len(self.size)):
            if dim not in self.dims:
                turned = turned.unsqueeze(dim)
        return turned

    def to_theirs(self, weight: Tensor) -> Tensor:
        """Return the box of our whole weight with dims in the tensor's order."""
        box = weight[tuple(slice(start, start + size) for start, size in zip(self.start, self.size, strict=True))]
        absent = [dim for dim in range(len(self.size)) if dim not in self.dims]
        turned = box.permute(*self.dims, *absent)
        for _ in absent:
            turned = turned.squeeze(-1)
        return turned


def whole(tensor: str, shape: tuple[int, ...]) -> Piece:
    """Return the piece of a tensor that is our whole weight under another name."""
    zeros = (0,) * len(shape)
    return Piece(tensor=tensor, start=zeros, size=shape, dims=tuple(range(len(shape))), offset=zeros)


def transposed(tensor: str, shape: tuple[int, ...], column: int = 0) -> Piece:
    """Return the piece of a matrix that is [in, out] in the file, from a column on."""
    return Piece(tensor=tensor, start=(0, 0), size=shape, dims=(1, 0), offset=(0, column))
