"""The optimizer state of one weight on the host, and how far a step is with it.

    state     an optimizer has for the weight     left by
    empty     nothing yet                         its first part is updated: partly
    whole     all entries, on the host            a part is updated: partly, or whole if it is the only one
    partly    the entries of the step before      the last of its parts is updated: whole

A large weight is updated some rows at a time, in several chunks. Its parts all begin with the same count of steps, so
the optimizer is told of new entries only when all of them were updated.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.dataflow.streams import Event
from shardwise.states.tiers.chunks import Chunk, is_many
from shardwise.states.tiers.copy_streams import CopyStreams
from shardwise.states.tiers.packing import Packing
from shardwise.states.tiers.residency import Places, Residency, WeightSlice


class WeightState:
    """What an optimizer keeps of one weight, on the host."""

    def __init__(self, optimizer: Optimizer, residency: Residency) -> None:
        self.optimizer, self.residency, self.weight = optimizer, residency, residency.weight
        self.chunks: list[Chunk] = []
        #: Its entries that have a number for each of the weight's, or for its rows, in pinned memory.
        self.host: dict[str, Tensor] = {}
        #: When a weight on the device that was updated is new.
        self.renewed: list[Event] = []
        self._num_updated = 0
        self._new: dict[str, Any] = {}

    @property
    def is_whole(self) -> bool:
        """Whether one chunk has all of it."""
        return len(self.chunks) == 1

    def entries(self) -> Iterator[tuple[str, Tensor]]:
        """What the optimizer keeps now, but for single numbers: these are anywhere."""
        for key, value in self.optimizer.state.get(self.weight, {}).items():
            if is_many(value):
                yield key, value

    @property
    def has_foreign(self) -> bool:
        """Whether state was put into the optimizer from outside."""
        return any(value is not self.host.get(key) for key, value in self.entries())

    def staged(self, part: WeightSlice) -> dict[str, Tensor]:
        """What of it comes with a part. In the step that makes it there is none yet."""
        if not self.optimizer.state.get(self.weight):
            return {}
        return {key: part.of(host) for key, host in self.host.items()}

    def given(self, places: Places) -> dict[str, Any]:
        """What the optimizer has of a part: what is staged, and counts of steps of its own."""
        kept = self.optimizer.state.get(self.weight, {})
        return {key: places[key] if key in places else _own(each) for key, each in kept.items()}

    def take(self, part: WeightSlice, state: Mapping[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """A part was updated, and this is its state: what of it goes home, and where."""
        for key, value in state.items():
            self._new[key] = self.host[key] if is_many(value) else value
            if is_many(value):
                yield part.of(self.host[key]), value.contiguous()

    def part_is_updated(self) -> None:
        """With the last part, all of it was updated: then the optimizer has what it keeps of it from now on."""
        self._num_updated += 1
        if self._num_updated == len(self.chunks):
            self._num_updated = 0
            self.residency.end()
            if self._new:
                self.optimizer.state[self.weight], self._new = self._new, {}

    def forget_step(self) -> None:
        """What was updated in part is old."""
        self._num_updated, self._new = 0, {}


def allocate(likes: Sequence[tuple[WeightState, str, Tensor]], copies: CopyStreams) -> None:
    """Memory for entries of states, like these; of those that are cut, some rows may be given.

    What comes whole is packed as it is in a staging buffer. Behind rows there are others, and no padding.
    """
    together = [(state, key, like) for state, key, like in likes if state.is_whole]
    for state, key, like in likes:
        if not state.is_whole:
            state.host[key] = copies.pinned(state.weight.shape, like.dtype)
    if together:
        packing = Packing.of(like for _, _, like in together)
        memory = copies.pinned((packing.num_bytes,), torch.uint8)
        for (state, key, _), host in zip(together, packing.views(memory), strict=True):
            state.host[key] = host


@torch.no_grad()
def take_to_host(states: Iterable[WeightState], copies: CopyStreams) -> None:
    """State that was put into the optimizers from outside goes to the host; what is there stays."""
    found: list[tuple[WeightState, str, Tensor]] = []
    for state in states:
        state.forget_step()
        entries = dict(state.entries())
        state.host = {key: value for key, value in entries.items() if value is state.host.get(key)}
        found += [(state, key, value) for key, value in entries.items() if key not in state.host]
    allocate(found, copies)
    for state, key, value in found:
        state.optimizer.state[state.weight][key] = state.host[key].copy_(value)


def _own(value: Any) -> Any:
    """A count of steps, say, for a part of a weight: it is counted up there."""
    return value.clone() if isinstance(value, Tensor) else value
