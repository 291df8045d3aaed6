"""Dropout whose masks no plan changes: they come from the seed, the step, the layer's name and a number's place.

    place in the whole batch        which rank has it
    row                             dp, and the microbatch
    token                           cp, and sp between layers that are cut
    channel, head                   tp, inside of layers that are cut

A number is hashed from these, so that no rank draws what others use, and a forward that is run again for its backward
drops the same. It is for `nn.Dropout`; attention that drops weights inside its kernel draws its own.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from shardwise.runtime.batch import length_of
from shardwise.runtime.stage import Batch
from shardwise.runtime.tensor.around import surround
from shardwise.runtime.tensor.streams import Channels

# The increment and multipliers of splitmix64 (Steele et al. 2014), as signed numbers.
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
#: A mask is drawn with so many bits.
_BITS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the numbers of a microbatch stand: its rows in the batch of a step, and its tokens in their sequences.

    `tokens` None: all of them, in order. `num_pieces` and `piece`: where a sequence may be cut again, this rank's part.
    """

    step: int
    first_row: int
    num_rows: int = 1
    num_tokens: int | None = None
    tokens: Tensor | None = None
    piece: int = 0
    num_pieces: int = 1


@dataclass(slots=True)
class Dropouts:
    """The dropouts of one module. `channels` says which channels this rank is at, inside of layers that are cut."""

    seed: int
    channels: Callable[[], Channels | None] = lambda: None
    _places: dict[int, Place] = field(default_factory=dict)
    _now: Place | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> "Dropouts":
        return self  # A copy of the module, for its shapes alone, draws nothing.

    def attach(self, module: nn.Module) -> bool:
        """Let every dropout of a module draw from here. Returns whether there is one."""
        found = {name: each for name, each in module.named_modules() if isinstance(each, nn.Dropout) and each.p > 0}
        for name, each in found.items():
            surround(each, partial(self._drop, name, each.p))
        return bool(found)

    def take(self, microbatches: Sequence[Batch], first: Place) -> None:
        """Say where the microbatches of a step stand, which come one after the other from a first place on."""
        self._places = {key: place for key, place in self._places.items() if place.step >= first.step - 1}
        row = first.first_row
        for microbatch in microbatches:
            rows = length_of(microbatch)
            self._places[id(microbatch)] = replace(first, first_row=row, num_rows=rows)
            row += rows

    def select(self, microbatch: Batch) -> None:
        """A forward of a microbatch is about to be run, for the first time or again."""
        self._now = self._places.get(id(microbatch))

    def _drop(self, name: str, probability: float, call: Callable[..., Tensor], *args: Tensor) -> Tensor:
        (given,) = args
        module: nn.Module = call.args[0]  # type: ignore[attr-defined]
        if not module.training or given.is_meta or self._now is None or given.shape[0] % self._now.num_rows:
            return call(given)
        keeps = self._mask(name, probability, given, self._now)
        return given * keeps.to(given.dtype).mul_(1 / (1 - probability)) if probability < 1 else given * 0

    def _mask(self, name: str, probability: float, given: Tensor, place: Place) -> Tensor:
        key = _key(f"{self.seed}/{place.step}/{name}")
        rows = torch.arange(place.first_row, place.first_row + place.num_rows, device=given.device)
        inner = _inner_places(given, place, self.channels())
        drawn = _mixed(_mixed(rows * _GOLDEN + key).unsqueeze(1) + inner * _GOLDEN)
        bits: Tensor = _shifted(drawn, 64 - _BITS)
        return (bits >= int(probability * 2**_BITS)).view(given.shape)


def num_tokens_of(batch: Batch) -> int | None:
    """How many tokens a sequence of a batch has, as far as one can see."""
    return next((each.shape[1] for each in batch.values() if isinstance(each, Tensor) and each.dim() > 1), None)


def _inner_places(given: Tensor, place: Place, channels: Channels | None) -> Tensor:
    """For each number of a row, in order, its place in the row of one device."""
    several = given.shape[0] // place.num_rows
    wholes = [*([several] if several > 1 else []), *given.shape[1:]]
    axes = [torch.arange(size, device=given.device) for size in wholes]
    offset = _place_channels(axes, wholes, channels)
    _place_tokens(axes, wholes, place)
    found = torch.full((1,), offset, dtype=torch.int64, device=given.device)
    for axis, whole in zip(axes, wholes, strict=True):
        found = (found.unsqueeze(1) * whole + axis).flatten()
    return found


def _place_channels(axes: list[Tensor], wholes: list[int], channels: Channels | None) -> int:
    """Inside of layers that are cut: the last dim is channels, or the first of three is heads.

    Of another form it is not known which numbers these are: then ranks differ by what is returned.
    """
    if channels is None:
        return 0
    mine = torch.tensor(channels.places)
    if axes and len(axes[-1]) == len(mine):
        axes[-1], wholes[-1] = mine.to(axes[-1].device), channels.whole
        return 0
    if len(axes) == 3 and len(mine) % len(axes[0]) == 0:
        size = len(mine) // len(axes[0])
        axes[0], wholes[0] = (mine[::size] // size).to(axes[0].device), channels.whole // size
        return 0
    return 1 + channels.places[0] if channels.places else 0


def _place_tokens(axes: list[Tensor], wholes: list[int], place: Place) -> None:
    """The first dim that has as many numbers as this rank has tokens, or a piece of them, is that of tokens."""
    if place.num_tokens is None:
        return
    piece = place.num_tokens // place.num_pieces
    for number, axis in enumerate(axes):
        if len(axis) not in (place.num_tokens, piece):
            continue
        tokens = torch.arange(place.num_tokens) if place.tokens is None else place.tokens
        if len(axis) != place.num_tokens:
            tokens = tokens[place.piece * piece : (place.piece + 1) * piece]
        # Tokens come first in a row, so that how many there are changes no number's place.
        axes[number] = tokens.to(axis.device)
        wholes[number] = 2**31
        return


def _key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def _mixed(numbers: Tensor) -> Tensor:
    """Numbers of 64 bits, each hashed to another."""
    numbers = (numbers ^ _shifted(numbers, 30)) * _FIRST
    numbers = (numbers ^ _shifted(numbers, 27)) * _SECOND
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, by: int) -> Tensor:
    """To the right, with zeros coming in."""
    shifted: Tensor = (numbers >> by) & (2 ** (64 - by) - 1)
    return shifted
