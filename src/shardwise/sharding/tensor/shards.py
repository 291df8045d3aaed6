"""How a parameter lies on the ranks of a tensor parallel group."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: Half-open runs of places along a dim.
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Shards:
    """A parameter in pieces along one dim, or whole on every rank (`dim` is None).

    `runs` are the places that each rank holds, in order. A place may be on several ranks (a key head that the queries
    of two ranks share); then the gradient of each is a part. `padded` is the length of every piece where pieces are
    filled up with zeros to be of one length.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    runs: tuple[Runs, ...] = ()
    padded: int | None = None
    #: Whether each rank's gradient is a part of the sum, though several hold the same numbers.
    is_partial: bool = False

    def local(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's piece."""
        if self.dim is None:
            return whole
        pieces = [whole.narrow(self.dim, start, stop - start) for start, stop in self.runs[rank]]
        if self.padded is not None and (missing := self.padded - self.length(rank)):
            pieces.append(whole.new_zeros(self._with_length(missing)))
        return torch.cat(pieces, self.dim) if len(pieces) != 1 else pieces[0]

    def whole(self, pieces: Sequence[Tensor], *, summed: bool = False) -> Tensor:
        """The parameter from all pieces. `summed`: places on several ranks are added up, as gradients are."""
        if self.dim is None:
            return torch.stack(list(pieces)).sum(0) if summed and self.is_partial else pieces[0]
        whole = pieces[0].new_zeros(self.shape)
        for rank, piece in enumerate(pieces):
            self.put(whole, piece, rank, summed=summed)
        return whole

    def put(self, whole: Tensor, piece: Tensor, rank: int, *, summed: bool = False) -> None:
        """Write, or add, a rank's piece to where it belongs."""
        assert self.dim is not None, "a parameter that is whole has no pieces"
        at = 0
        for start, stop in self.runs[rank]:
            target = whole.narrow(self.dim, start, stop - start)
            source = piece.narrow(self.dim, at, stop - start)
            target.add_(source) if summed else target.copy_(source)
            at += stop - start

    def length(self, rank: int) -> int:
        """How many places a rank holds, without padding."""
        return sum(stop - start for start, stop in self.runs[rank])

    def counted(self, piece: Tensor, rank: int) -> Tensor:
        """The part of a piece that this rank counts where all ranks together count every number once."""
        if self.dim is None:
            return piece if rank == 0 else piece[:0] if piece.dim() else piece.new_zeros(0)
        taken = np.zeros(self.shape[self.dim], dtype=bool)
        for other in range(rank):
            taken[places(self.runs[other])] = True
        kept = np.flatnonzero(~taken[places(self.runs[rank])])
        if len(kept) == piece.shape[self.dim]:
            return piece
        return piece.index_select(self.dim, torch.from_numpy(kept).to(piece.device))

    def _with_length(self, length: int) -> tuple[int, ...]:
        assert self.dim is not None, "a parameter that is whole has one shape"
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])


def places(runs: Runs) -> NDArray[np.int64]:
    """Every place of some runs."""
    return np.concatenate([np.arange(start, stop) for start, stop in runs] or [np.zeros(0, dtype=np.int64)])


def runs_of(positions: NDArray[np.int64]) -> Runs:
    """Places, in ascending order, as runs."""
    if not len(positions):
        return ()
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(positions, breaks))


def even_runs(length: int, count: int) -> tuple[Runs, ...]:
    """A length in as many runs as there are ranks, the first of one length, the last with what is left."""
    size = -(-length // count)
    return tuple(
        ((min(rank * size, length), min((rank + 1) * size, length)),) if rank * size < length else ()
        for rank in range(count)
    )
