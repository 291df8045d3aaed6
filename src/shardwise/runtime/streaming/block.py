"""The weights of one block as one run of bytes, on the host for good and on the device for a while.

On the device a block keeps one storage for as long as it lives. When the weights leave, its memory goes and the storage
stays, empty; when they come back it has memory again. So a view of a weight that autograd has kept from the forward
sees the weight again in the backward.

    host      [ q_proj | k_proj | v_proj | ... ]      pinned, always there; or nothing, if they stay on disk
    device    [ q_proj | k_proj | v_proj | ... ]      or nothing
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

_ALIGNMENT = 256


class _Piece(NamedTuple):
    """A parameter, and where it lies."""

    parameter: nn.Parameter
    start: int
    num_bytes: int


class Block:
    """Weights that come and go together. `pinned` is of `num_bytes_of(parameters)` bytes, None if they stay on disk."""

    def __init__(self, parameters: Sequence[nn.Parameter], pinned: Tensor | None, device: torch.device) -> None:
        self.host = pinned
        self.num_bytes = num_bytes_of(parameters)
        self._pieces = _lay_out(parameters)
        self.device = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        for parameter, start, num_bytes in self._pieces:
            own = slice(start, start + num_bytes)
            if self.host is not None and not parameter.is_meta:  # Else weights are still to be read, into `on_host`.
                self.host[own].copy_(parameter.detach().contiguous().view(-1).view(torch.uint8))
            parameter.data = self.device[own].view(parameter.dtype).view(parameter.shape)
        self.leave()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Whose weights they are."""
        return [parameter for parameter, _, _ in self._pieces]

    @property
    def is_here(self) -> bool:
        """Whether there is memory for it on the device."""
        return self.device.untyped_storage().nbytes() > 0

    def arrive(self) -> Tensor:
        """Give it memory on the device; what is in it then is for the caller to copy."""
        self.device.untyped_storage().resize_(self.num_bytes)
        return self.device

    def leave(self) -> None:
        """Give its memory back. What was already put to compute may still read it: memory is reused in that order."""
        self.device.untyped_storage().resize_(0)

    def on_host(self) -> dict[nn.Parameter, Tensor]:
        """Each parameter's weights on the host, without a copy."""
        return {} if self.host is None else self.views(self.host)

    def views(self, memory: Tensor) -> dict[nn.Parameter, Tensor]:
        """Each parameter's part of a run of bytes that is laid out as the block is."""
        return {
            parameter: memory[start : start + num_bytes].view(parameter.dtype).view(parameter.shape)
            for parameter, start, num_bytes in self._pieces
        }


def num_bytes_of(parameters: Sequence[nn.Parameter]) -> int:
    """The bytes of a block of these parameters."""
    pieces = _lay_out(parameters)
    return pieces[-1].start + pieces[-1].num_bytes if pieces else 0


def _lay_out(parameters: Sequence[nn.Parameter]) -> list[_Piece]:
    pieces: list[_Piece] = []
    end = 0
    for parameter in parameters:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        pieces.append(_Piece(parameter, start, parameter.numel() * parameter.element_size()))
        end = start + pieces[-1].num_bytes
    return pieces
