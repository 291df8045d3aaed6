"""The weights of one block: the user's parameters on the host, and guests on the device that stand for them.

A parameter stays what it was, on the host, for its optimizer and for everybody who looks at it. While its block runs,
the block's modules have another parameter in its place, the guest. The guests of a block are views of one storage that
it keeps for as long as it lives. When the weights leave, the memory goes and the storage stays, empty; when they come
back it has memory again. So what autograd has kept of a guest in the forward is the weight again in the backward.

    host      [ q_proj | k_proj | v_proj | ... ]      pinned, always there; or in files, if they stay on disk
    device    [ q_proj | k_proj | v_proj | ... ]      guests, or nothing
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.states.tiers.disk_scratch import Scratch
from shardwise.torch_private import parameter_slots, version_of

_ALIGNMENT = 256


class Piece(NamedTuple):
    """A parameter, what stands for it on the device, and where both lie in their runs of bytes."""

    parameter: nn.Parameter
    guest: nn.Parameter
    start: int
    num_bytes: int


class _Seat(NamedTuple):
    """Where a module looks for a parameter."""

    module: nn.Module
    name: str
    piece: Piece


class Block:
    """Weights that come and go together. Their home is of `num_bytes_of(parameters)` bytes: pinned memory, or a file
    that is ours; None if they are read from a file that is not."""

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        home: Tensor | Scratch | None,
        device: torch.device,
    ) -> None:
        self.scratch = home if isinstance(home, Scratch) else None
        self.host = home.weights if isinstance(home, Scratch) else home
        self.num_bytes = num_bytes_of(parameters)
        self.device = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        self.pieces = [
            Piece(parameter, _guest(parameter, self.device[start : start + num_bytes]), start, num_bytes)
            for parameter, (start, num_bytes) in zip(parameters, _lay_out(parameters), strict=True)
        ]
        by_parameter = {piece.parameter: piece for piece in self.pieces}
        self._seats = [
            _Seat(each, name, by_parameter[parameter])
            for each in module.modules()
            for name, parameter in parameter_slots(each).items()
            if parameter is not None and parameter in by_parameter
        ]
        self.gather()
        self.leave()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Whose weights they are."""
        return [piece.parameter for piece in self.pieces]

    @property
    def is_on_disk(self) -> bool:
        """Whether its weights are in a file, which has to be read for them."""
        return self.host is None or self.scratch is not None

    @property
    def is_here(self) -> bool:
        """Whether there is memory for it on the device."""
        return self.device.untyped_storage().nbytes() > 0

    @property
    def version(self) -> int:
        """Grows whenever a parameter is written to."""
        return sum(version_of(piece.parameter) for piece in self.pieces)

    @property
    def is_gathered(self) -> bool:
        """Whether its parameters lie where they were put: nobody has given one of them other memory."""
        if self.host is None:
            return True
        base = self.host.data_ptr()
        return all(piece.parameter.data_ptr() == base + piece.start for piece in self.pieces)

    def gather(self) -> None:
        """Have every parameter lie in the host's run of bytes: one that was given other memory is copied there."""
        if self.host is None:
            return
        for parameter, guest, start, num_bytes in self.pieces:
            home = self.host[start : start + num_bytes]
            if parameter.data_ptr() == home.data_ptr():
                continue
            if parameter.dtype != guest.dtype or parameter.shape != guest.shape:
                raise ShardwiseError(
                    f"a weight of {list(guest.shape)} in {guest.dtype} has become {list(parameter.shape)} in"
                    f" {parameter.dtype} while its block is streamed",
                    remedy="the change before weights are streamed",
                )
            home.copy_(parameter.detach().contiguous().view(-1).view(torch.uint8))
            parameter.data = home.view(parameter.dtype).view(parameter.shape)

    def arrive(self) -> Tensor:
        """Give it memory on the device; what is in it then is for the caller to copy."""
        self.device.untyped_storage().resize_(self.num_bytes)
        return self.device

    def leave(self) -> None:
        """Give its memory back. What was already put to compute may still read it: memory is reused in that order."""
        self.device.untyped_storage().resize_(0)

    def seat_guests(self) -> None:
        """Let the block's modules compute with what is on the device."""
        for module, name, (parameter, guest, _, _) in self._seats:
            if guest.requires_grad != parameter.requires_grad:
                guest.requires_grad_(parameter.requires_grad)
            _put(module, name, guest)

    def seat_owners(self) -> None:
        """Let the block's modules have their parameters again."""
        for module, name, piece in self._seats:
            _put(module, name, piece.parameter)

    def views(self, memory: Tensor) -> dict[nn.Parameter, Tensor]:
        """Each parameter's part of a run of bytes that is laid out as the block is."""
        return {
            parameter: memory[start : start + num_bytes].view(guest.dtype).view(guest.shape)
            for parameter, guest, start, num_bytes in self.pieces
        }


def num_bytes_of(parameters: Sequence[nn.Parameter]) -> int:
    """The bytes of a block of these parameters."""
    return sum(_lay_out(parameters)[-1]) if parameters else 0


def _guest(parameter: nn.Parameter, memory: Tensor) -> nn.Parameter:
    guest = nn.Parameter(torch.empty(0, dtype=parameter.dtype, device=memory.device), parameter.requires_grad)
    # As `data`: to autograd what is copied into the memory is no change of the guest.
    guest.data = memory.view(parameter.dtype).view(parameter.shape)
    return guest


def _lay_out(parameters: Sequence[nn.Parameter]) -> list[tuple[int, int]]:
    """Where each parameter begins, and its bytes."""
    found: list[tuple[int, int]] = []
    end = 0
    for parameter in parameters:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        num_bytes = parameter.numel() * parameter.element_size()
        found.append((start, num_bytes))
        end = start + num_bytes
    return found


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    if type(module).__setattr__ is nn.Module.__setattr__:
        parameter_slots(module)[name] = parameter
    else:
        setattr(module, name, parameter)  # It keeps lists of its weights, as recurrent layers do.
