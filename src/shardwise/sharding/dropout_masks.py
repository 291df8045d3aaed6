"""The numbers behind a dropout mask: hashes of the place of each element in the whole batch (`dropout.py`)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwise.ranks.collectives import longest_piece
from shardwise.sharding.rng_tracker import Channels
from shardwise.stages.rows import tensors_in
from shardwise.stages.stage import Batch

# The increment and multipliers of splitmix64 (Steele et al. 2014), as signed numbers.
GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
#: The number of random bits per element of a mask.
_BITS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The position of a microbatch: its rows in the batch of a step, and its tokens in their sequences.

    `rows` None: consecutive from `first_row`. `tokens` None: all of them, in order. `num_pieces` and `piece`: where a
    sequence may be cut once more (sequence parallelism), the number of pieces and this rank's piece.
    """

    step: int
    first_row: int
    num_rows: int = 1
    rows: Tensor | None = None
    num_tokens: int | None = None
    tokens: Tensor | None = None
    piece: int = 0
    num_pieces: int = 1
    #: What tells the masks of rows that a forward has selected from those of other ranks and microbatches.
    mark: str = ""

    def strange(self, num_rows: int) -> "Place":
        """Return the place of rows that this microbatch's forward has selected, numbered as they come.

        Ranks with the same tokens draw alike, and others do not, except that pieces of a sequence between layers that
        are cut (sp) draw like each other: a forward may have selected from all of them.
        """
        first = self.first_row if self.rows is None else int(self.rows[0])
        token = 0 if self.tokens is None or not len(self.tokens) else int(self.tokens[0])
        return Place(step=self.step, first_row=0, num_rows=num_rows, mark=f"/selected from {first}, {token}")

    def all_rows(self, device: torch.device) -> Tensor:
        if self.rows is not None:
            return self.rows.to(device, non_blocking=True)
        return torch.arange(self.first_row, self.first_row + self.num_rows, device=device)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightDrop:
    """Dropout of one attention's weights. `rows` and `heads` are the global positions of those on this rank."""

    key: int
    probability: float
    rows: Tensor
    heads: Tensor

    def factors(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the factors of the weights, [rows, heads, queries, keys], for positions of queries and keys."""
        drawn = mixed(self.rows * GOLDEN + self.key)
        for places in (self.heads, queries, keys):
            drawn = mixed(drawn.unsqueeze(-1) + places * GOLDEN)
        return factors_of(drawn, self.probability)

    def of_heads(self, some: range) -> "WeightDrop":
        """Return the same dropout restricted to a range of this rank's heads."""
        return replace(self, heads=self.heads[some.start : some.stop])


def num_tokens_of(batch: Batch) -> int | None:
    """Return the tokens per sequence, taken from the first tensor with more than one dim; None if there is none."""
    return next((each.shape[1] for each in tensors_in(batch) if each.dim() > 1), None)


def places_of_elements(given: Tensor, place: Place, channels: Channels | None, key: int) -> Tensor:
    """Return a random number for the place of each element."""
    rows = place.all_rows(given.device)
    return mixed(mixed(rows * GOLDEN + key).unsqueeze(1) + _inner_places(given, place, channels) * GOLDEN)


def _inner_places(given: Tensor, place: Place, channels: Channels | None) -> Tensor:
    """For each element of a row, in order, return its position in that row on one device."""
    several = given.shape[0] // max(1, place.num_rows)
    wholes = [*([several] if several > 1 else []), *given.shape[1:]]
    axes = [torch.arange(size, device=given.device) for size in wholes]
    offset = _place_channels(axes, wholes, channels)
    _place_tokens(axes, wholes, place)
    found = torch.full((1,), offset, dtype=torch.int64, device=given.device)
    for axis, whole in zip(axes, wholes, strict=True):
        found = (found.unsqueeze(1) * whole + axis).flatten()
    return found


def _place_channels(axes: list[Tensor], wholes: list[int], channels: Channels | None) -> int:
    """Set positions along the channel dim inside layers that are cut: channels last, or heads first of three dims.

    Return 0. In any other form the positions are unknown: return an offset that differs between ranks.
    """
    if channels is None:
        return 0
    mine = torch.tensor(channels.places)
    if axes and len(axes[-1]) == len(mine):
        axes[-1], wholes[-1] = mine.to(axes[-1].device), channels.whole
        return 0
    if len(axes) == 3 and len(mine) % len(axes[0]) == 0:
        size = len(mine) // len(axes[0])
        axes[0], wholes[0] = heads_of(len(axes[0]), channels, axes[0].device), channels.whole // size
        return 0
    return 1 + channels.places[0] if channels.places else 0


def heads_of(num_heads: int, channels: Channels | None, device: torch.device) -> Tensor:
    """Return the global positions of the heads: all, or inside layers that are cut those of this rank's channels."""
    if channels is None or len(channels.places) % num_heads:
        return torch.arange(num_heads, device=device)
    size = len(channels.places) // num_heads
    # A blocking copy would make the host wait for all work queued on the GPU before it.
    return (torch.tensor(channels.places[::size]) // size).to(device, non_blocking=True)


def _place_tokens(axes: list[Tensor], wholes: list[int], place: Place) -> None:
    """Set global positions along the token dim: the first dim as long as this rank's tokens, or its piece of them."""
    if place.num_tokens is None:
        return
    tokens = torch.arange(place.num_tokens) if place.tokens is None else place.tokens
    size = longest_piece(place.num_tokens, place.num_pieces)
    piece = tokens[place.piece * size : (place.piece + 1) * size]
    # Channels follow tokens, and heads precede queries and keys: either dim may happen to be as long as the tokens.
    first = 1 if len(axes) == 3 and len(axes[1]) == len(axes[2]) else 0
    for number, axis in list(enumerate(axes))[first : max(1, len(axes) - 1)]:
        if len(axis) not in (len(tokens), len(piece)):
            continue
        # A fixed size, 2^31, so that an element's position does not depend on the sequence length.
        axes[number] = (tokens if len(axis) == len(tokens) else piece).to(axis.device, non_blocking=True)
        wholes[number] = 2**31
        return


def factors_of(drawn: Tensor, probability: float) -> Tensor:
    """Return 1 / (1 - probability) where an element is kept, so that the mean stays, and 0 where it is dropped."""
    if probability >= 1:
        return torch.zeros_like(drawn, dtype=torch.float32)
    keeps: Tensor = _shifted(drawn, 64 - _BITS) >= int(probability * 2**_BITS)
    return keeps.to(torch.float32).mul_(1 / (1 - probability))


def mixed(numbers: Tensor) -> Tensor:
    """Hash 64-bit numbers elementwise (splitmix64)."""
    numbers = (numbers ^ _shifted(numbers, 30)) * _FIRST
    numbers = (numbers ^ _shifted(numbers, 27)) * _SECOND
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, by: int) -> Tensor:
    """Shift right logically: zeros come in."""
    shifted: Tensor = (numbers >> by) & (2 ** (64 - by) - 1)
    return shifted
