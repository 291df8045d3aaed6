"""Logical data: one value with copies at several places. It is always known which copies hold the value.

    state of a copy     holds the value            other copies hold it too
    valid               yes                        yes
    dirty               yes                        no: it may be moved but not dropped
    invalid             no: holds an older value   -

A task that writes makes the copy at its place dirty and all others invalid. A transfer makes a valid copy from a valid
copy.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from shardwise.dataflow.streams import Event, Run
from shardwise.errors import ShardwiseError, unknown
from shardwise.torch_private import version_of


class Keeper(Protocol):
    """The owner of data: the machine that made them."""

    place_names: Sequence[str]

    def get(self, data: "Data") -> Tensor:
        """Wait for a value and return it on the host."""
        ...

    def set(self, data: "Data", tensor: Tensor) -> None:
        """Give data a new value."""
        ...

    def forget(self, data: "Data") -> None:
        """Release data that no user can reach any more."""
        ...


@dataclass(slots=True, eq=False)
class Copy:
    """One copy of a value: its buffer, whether it is current, and the last writer and readers of the buffer."""

    owner: "weakref.ref[Data]"
    place: int
    num_bytes: int
    tensor: Tensor
    storage: Tensor | None  # None if the buffer belongs to the user.
    valid: bool = False
    held: int = 0  # Number of programs and of tasks being issued that hold it: while above 0 it is not evicted.
    imported: Tensor | None = None  # The user's own tensor.
    imported_version: int = 0
    writer: Event | None = None
    reader: Event | None = None  # The last task that has read it since it was written.
    copied: list[Event] = field(default_factory=list)  # Transfers out of it since then: the last of each stream.

    def add_copied(self, event: Event) -> None:
        """Note a transfer that reads this copy until the event."""
        if event.number >= 0:
            self.copied = [each for each in self.copied if each.stream is not event.stream]
        # While recording a program, keep all: of two transfers in one stream, only one may end up in a graph.
        self.copied.append(event)

    def written(self, event: Event | None) -> None:
        """Note the writer. Later users wait for it alone, so earlier readers are forgotten."""
        self.writer, self.reader, self.valid = event, None, True
        if self.copied:
            self.copied = []

    def busy_until(self) -> list[Event]:
        """Return the events to wait for before the buffer may be written."""
        events = list(self.copied)
        if self.writer is not None:
            events.append(self.writer)
        if self.reader is not None:
            events.append(self.reader)
        return events

    def check_unchanged(self, name: str) -> None:
        """Refuse a user's tensor that was modified outside of the machine since it was imported."""
        if self.imported is not None:
            _check_unchanged(name, self.imported, self.imported_version)

    def guard(self, name: str) -> Run | None:
        """Return the same check for a thread to run when it reads the tensor; None if it is not a user's."""
        return None if self.imported is None else partial(_check_unchanged, name, self.imported, self.imported_version)


def run_guarded(run: Run, guards: Sequence[Run]) -> None:
    """Run something after all guards; a guard that objects raises."""
    for guard in guards:
        guard()
    run()


def _check_unchanged(name: str, imported: Tensor, version: int) -> None:
    if version_of(imported) != version:
        raise ShardwiseError(
            f"{name} was changed behind the machine's back: its tensor was written in place after it was given",
            remedy=f"{name}.set(tensor), which the machine sees",
        )


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class Data:
    """A value that tasks read and write. Made by `Machine.data` and `Machine.empty`."""

    keeper: Keeper
    name: str
    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int
    copies: list[Copy | None]  # One for each place.
    uses: tuple[int, ...] = ()  # Positions of its uses in the running program.
    is_imported: bool = False  # Whether one of its copies is a user's tensor.
    unwritable: str | None = None  # The reason why it may not be written, if it may not.

    def __repr__(self) -> str:
        return f"Data({self.name}, {list(self.shape)}, {self.dtype}, at {', '.join(self.places) or 'no place'})"

    def __del__(self) -> None:
        self.keeper.forget(self)

    @property
    def valid_copies(self) -> list[Copy]:
        """The copies that hold the value."""
        return [copy for copy in self.copies if copy is not None and copy.valid]

    @property
    def has_value(self) -> bool:
        """Whether any copy holds a value."""
        for copy in self.copies:  # noqa: SIM110 - asked for each argument of each task, and this is twice as fast
            if copy is not None and copy.valid:
                return True
        return False

    @property
    def places(self) -> tuple[str, ...]:
        """The places with a valid copy."""
        return tuple(self.keeper.place_names[copy.place] for copy in self.valid_copies)

    def state(self, place: str) -> str:
        """Return the state of the copy at a place: `valid`, `dirty`, `invalid` or `absent`."""
        names = self.keeper.place_names
        if place not in names:
            raise unknown("place", place, names)
        copy = self.copies[names.index(place)]
        if copy is None:
            return "absent"
        if not copy.valid:
            return "invalid"
        return "valid" if len(self.valid_copies) > 1 else "dirty"

    def get(self) -> Tensor:
        """Wait for the value and return it on the host: in the user's tensor if one was given, else in a new one."""
        return self.keeper.get(self)

    def set(self, tensor: Tensor) -> None:
        """Give it a new value."""
        self.keeper.set(self, tensor)

    def view(self, storage: Tensor) -> Tensor:
        """Return a buffer of the right size viewed with the value's shape and dtype."""
        return torch.as_strided(storage.view(self.dtype), self.shape, self.strides)
