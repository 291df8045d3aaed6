"""How long the sequences are of which ranks see their pieces."""

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

from shardwise.ranks.collectives import Group, gather, scatter


class SequenceLength:
    """The sequences of one list of blocks: how many there are, and their tokens. A piece tells neither.

    Tensors are (batch, tokens, channels); or (batch x tokens, channels), as some blocks have them in between.
    """

    def __init__(self) -> None:
        self.batch, self.tokens = 0, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "SequenceLength":
        return self  # A copy of a module is run in the midst of its original, on the same sequences.

    def note(self, whole: Tensor) -> None:
        """Take over the shape of all tokens."""
        *lead, self.tokens = whole.shape[:-1]
        self.batch = prod(lead)

    def whole_shape(self, piece: Sequence[int]) -> tuple[int, ...]:
        """The shape of all tokens, from that of a piece; both without channels."""
        return (*piece[:-1], self.tokens) if len(piece) > 1 else (self.batch * self.tokens,)

    def gather(self, piece: Tensor, group: Group, *, used_alike: bool) -> Tensor:
        """All tokens, of which each rank has a piece. `used_alike`: all ranks compute the same from them."""
        found = gather(self._by_sequence(piece), group, -2, used_alike=used_alike, length=self.tokens)
        return found.reshape(*self.whole_shape(piece.shape[:-1]), piece.shape[-1])

    def scatter(self, whole: Tensor, group: Group) -> Tensor:
        """This rank's piece of all tokens."""
        found = scatter(self._by_sequence(whole), group, -2)
        return found.flatten(0, 1) if whole.dim() == 2 else found

    def _by_sequence(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.dim() > 2 else tensor.reshape(self.batch, len(tensor) // self.batch, tensor.shape[-1])
