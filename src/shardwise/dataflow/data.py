"""Logical data: one value, with copies at several places. Which copies hold the value is always known.

    state of a copy     the value is there     others have it too
    valid               yes                    yes
    dirty               yes                    no: it may not be dropped, only moved
    invalid             no: an older one is    -

A task that writes makes its place's copy the dirty one. A transfer makes a valid copy of a valid copy.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from shardwise.dataflow.streams import Event
from shardwise.errors import ShardwiseError, unknown
from shardwise.torch_private import version_of


class Keeper(Protocol):
    """Whoever made the data: the machine."""

    place_names: Sequence[str]

    def get(self, data: "Data") -> Tensor:
        """Wait for a value and return it on the host."""
        ...

    def set(self, data: "Data", tensor: Tensor) -> None:
        """Give data a new value."""
        ...

    def forget(self, data: "Data") -> None:
        """Nobody will ask for the data again."""
        ...


class Copy:
    """One copy of a value: its buffer, whether it is current, and who last wrote and read the buffer."""

    __slots__ = (
        "copied",
        "held",
        "imported",
        "imported_version",
        "num_bytes",
        "owner",
        "place",
        "reader",
        "storage",
        "tensor",
        "valid",
        "writer",
    )

    def __init__(self, owner: "Data", place: int, tensor: Tensor, storage: Tensor | None) -> None:
        self.owner: weakref.ref[Data] = weakref.ref(owner)
        self.place = place
        self.tensor = tensor
        self.storage = storage  # None if the buffer is a user's.
        self.num_bytes = owner.num_bytes
        self.valid = False
        self.held = 0  # By tasks that are being issued and by programs: not to be evicted.
        self.imported: Tensor | None = None  # The user's own tensor.
        self.imported_version = 0
        self.writer: Event | None = None
        self.reader: Event | None = None  # The last task that read it since it was written.
        self.copied: list[Event] = []  # Copies made of it since it was written, the last of each stream.

    def add_copied(self, event: Event) -> None:
        """Note that it is being copied from, until an event."""
        if event.number >= 0:
            self.copied = [each for each in self.copied if each.stream is not event.stream]
        # On a tape all are kept: of two copies of one stream, one may come to be in a graph and the other not.
        self.copied.append(event)

    def written(self, event: Event | None) -> None:
        """Note who writes it: whoever comes next waits for that alone."""
        self.writer, self.reader, self.valid = event, None, True
        if self.copied:
            self.copied = []

    def busy_until(self) -> list[Event]:
        """What has to be over before the buffer may be written."""
        events = list(self.copied)
        if self.writer is not None:
            events.append(self.writer)
        if self.reader is not None:
            events.append(self.reader)
        return events

    def check_unchanged(self, name: str) -> None:
        """Refuse a user's tensor that somebody else has changed since the machine took it."""
        if self.imported is not None:
            _check_unchanged(name, self.imported, self.imported_version)

    def guard(self, name: str) -> "Callable[[], None] | None":
        """The same question for a thread to ask when it comes to reading the tensor, if it is a user's."""
        return None if self.imported is None else partial(_check_unchanged, name, self.imported, self.imported_version)


def _check_unchanged(name: str, imported: Tensor, version: int) -> None:
    if version_of(imported) != version:
        raise ShardwiseError(
            f"{name} was changed behind the machine's back: its tensor was written in place after it was given",
            remedy=f"{name}.set(tensor), which the machine sees",
        )


class Data:
    """A value that tasks read and write. Made by `Machine.data` and `Machine.empty`."""

    __slots__ = (
        "__weakref__",
        "copies",
        "dtype",
        "is_imported",
        "keeper",
        "name",
        "num_bytes",
        "number",
        "shape",
        "strides",
        "unwritable",
        "uses",
    )

    def __init__(self, keeper: Keeper, name: str, number: int, like: Tensor) -> None:
        self.keeper = keeper
        self.name = name
        self.number = number
        self.shape = tuple(like.shape)
        self.strides = tuple(like.stride())
        self.dtype = like.dtype
        self.num_bytes = like.numel() * like.element_size()
        self.uses: tuple[int, ...] = ()  # Where in the running program it is used.
        self.is_imported = False  # Whether one of its copies is a user's tensor.
        self.unwritable: str | None = None  # Why it may not be written, if so.
        self.copies: list[Copy | None] = [None] * len(keeper.place_names)

    def __repr__(self) -> str:
        return f"Data({self.name}, {list(self.shape)}, {self.dtype}, at {', '.join(self.places) or 'no place'})"

    def __del__(self) -> None:
        if hasattr(self, "copies"):
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
        """Where it is: the places with a valid copy."""
        return tuple(self.keeper.place_names[copy.place] for copy in self.valid_copies)

    def state(self, place: str) -> str:
        """`valid`, `dirty`, `invalid` or `absent`."""
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
        """Wait for the value and return it on the host: the tensor that was given, else a new one."""
        return self.keeper.get(self)

    def set(self, tensor: Tensor) -> None:
        """Give it a new value."""
        self.keeper.set(self, tensor)

    def view(self, storage: Tensor) -> Tensor:
        """The value's tensor in a buffer of its bytes."""
        return torch.as_strided(storage.view(self.dtype), self.shape, self.strides)
