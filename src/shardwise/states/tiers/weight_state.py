"""The optimizer state of one weight on the host, and how far a step is with it.

    state     an optimizer has for the weight     left by
    empty     nothing yet                         its first part is updated: partly
    whole     all entries, on the host            a part is updated: partly, or whole if it is the only one
    partly    the entries of the step before      the last of its parts is updated: whole

A large weight is updated some rows at a time, in several chunks. All of its parts start with the same count of steps,
so the optimizer gets new entries only when all of them were updated.
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
    """An optimizer's state of one weight, on the host."""

    def __init__(self, optimizer: Optimizer, residency: Residency) -> None:
        self.optimizer, self.residency, self.weight = optimizer, residency, residency.weight
        self.chunks: list[Chunk] = []
        #: Its entries with an element for each of the weight's, or for each row, in pinned memory.
        self.host: dict[str, Tensor] = {}
        #: Events after which an updated weight on the device is new.
        self.renewed: list[Event] = []
        self._num_updated = 0
        self._new: dict[str, Any] = {}

    @property
    def is_whole(self) -> bool:
        """Whether one chunk has all of it."""
        return len(self.chunks) == 1

    def entries(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimizer's entries, except single numbers, which may be anywhere."""
        for key, value in self.optimizer.state.get(self.weight, {}).items():
            if is_many(value):
                yield key, value

    @property
    def has_foreign(self) -> bool:
        """Whether state was put into the optimizer from outside."""
        return any(value is not self.host.get(key) for key, value in self.entries())

    def staged(self, part: WeightSlice) -> dict[str, Tensor]:
        """Return the entries that are copied for a part. In the step that creates them there are none yet."""
        if not self.optimizer.state.get(self.weight):
            return {}
        return {key: part.of(host) for key, host in self.host.items()}

    def given(self, places: Places) -> dict[str, Any]:
        """Return the optimizer's state of a part: staged entries, and its own counts of steps."""
        kept = self.optimizer.state.get(self.weight, {})
        return {key: places[key] if key in places else _own(each) for key, each in kept.items()}

    def take(self, part: WeightSlice, state: Mapping[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Take the state of an updated part; yield what is copied back: target and source."""
        for key, value in state.items():
            self._new[key] = self.host[key] if is_many(value) else value
            if is_many(value):
                yield part.of(self.host[key]), value.contiguous()

    def part_is_updated(self) -> None:
        """Count an updated part. With the last one, the optimizer gets the new entries."""
        self._num_updated += 1
        if self._num_updated == len(self.chunks):
            self._num_updated = 0
            self.residency.end()
            if self._new:
                self.optimizer.state[self.weight], self._new = self._new, {}

    def forget_step(self) -> None:
        """Drop partial updates."""
        self._num_updated, self._new = 0, {}


def allocate(likes: Sequence[tuple[WeightState, str, Tensor]], copies: CopyStreams) -> None:
    """Allocate memory for entries of states, like these; of entries that are cut, some rows may be given.

    Whole entries are packed as in a staging buffer. Rows are adjacent, without padding.
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
    """Move state that was loaded into the optimizers from outside to the host."""
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
    """Copy a value, such as a count of steps, for a part of a weight, which increments its own."""
    return value.clone() if isinstance(value, Tensor) else value
