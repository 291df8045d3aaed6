"""Data at the places of a machine: tensors imported from the user, and values returned to the user."""

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.dataflow.data import Copy, Data
from shardwise.dataflow.imports import Imports, home_of
from shardwise.dataflow.launch import Call
from shardwise.dataflow.mover import Mover
from shardwise.dataflow.place import Place
from shardwise.dataflow.streams import Event, Failures
from shardwise.errors import ShardwiseError, unknown


class Store(ABC):
    """Places, and the data at them. `set` is abstract because writing a value is a task, which a subclass submits."""

    def __init__(self, places: Sequence[Place], mover: Mover, failures: Failures) -> None:
        self.places, self.mover, self.failures = places, mover, failures
        self.place_names: Sequence[str] = [place.name for place in places]
        self.host = places[-2]
        self.imports = Imports(places)
        self.calls: list[Call] | None = None  # Collects submitted calls while a program is recorded or checked.
        self.first_values: dict[Data, Tensor] | None = None  # Collects initial values of data during a check.
        self._by_name = {place.name: place for place in places}
        self._forgotten: deque[list[Copy | None]] = deque()
        self._known: weakref.WeakSet[Data] = weakref.WeakSet()
        self._num_data = 0
        self._is_closed = False

    def data(self, tensor: Tensor, *, name: str | None = None, on_disk: bool = False) -> Data:
        """Import a tensor. Its memory is used in place; read the value through `Data.get`.

        With `on_disk`, the tensor is a file mapped into memory, such as safetensors: a thread reads it ahead of use.
        """
        found = self.imports.find(tensor)
        if found is not None:
            return found
        made = self._made(tensor, name)
        self.imports.add(made, tensor, on_disk=on_disk)
        if self.first_values is not None:
            self.first_values[made] = tensor.detach().cpu().clone()
        return made

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, name: str | None = None) -> Data:
        """Make data without a value; memory is allocated when a task writes it."""
        return self._made(torch.empty(tuple(shape), dtype=dtype, device="meta"), name)

    def get(self, data: Data) -> Tensor:
        """Wait for a value and return it on the host: in the user's tensor if one was given, else in a new one."""
        if self.calls is not None:
            raise ShardwiseError(
                f"{data.name}.get() is asked for inside of a program that is being recorded",
                remedy="get() after the program has run",
            )
        self._drop_forgotten()
        self._raise_failure()
        home = home_of(data)
        copy = self.mover.fetch(data, self.host if home is None else self.places[home.place])
        copy.check_unchanged(data.name)
        if copy.writer is not None:
            self._wait_for(copy.writer)
        self._raise_failure()
        self.imports.changed.pop(data.number, None)
        return copy.tensor.clone() if copy.imported is None else copy.imported

    @abstractmethod
    def set(self, data: Data, tensor: Tensor) -> None:
        """Give data a new value."""

    def wait(self) -> None:
        """Wait until all submitted work is done, and raise the first failure."""
        for place in self.places:
            for stream in place.streams:
                if stream.last is not None:
                    self._wait_for(stream.last)
        self._raise_failure()

    def place(self, name: str) -> Place:
        """Return a place by its name."""
        if name not in self._by_name:
            raise unknown("place", name, self.place_names)
        return self._by_name[name]

    def all_data(self) -> list[Data]:
        """Return all data that are still referenced, in the order in which they were made."""
        return sorted(self._known, key=lambda data: data.number)

    def forget(self, data: Data) -> None:
        """Mark data as unreachable. Any thread may call this: the next task releases the memory."""
        if not self._is_closed:
            self._forgotten.append(data.copies)

    def close(self) -> None:
        """Write values back to the imported tensors, wait, and end the machine's threads."""
        if self._is_closed:
            return
        try:
            if self.failures.first is None:
                for data in list(self.imports.changed.values()):
                    self.get(data)
                self.wait()
        finally:
            self._is_closed = True
            self.failures.note(ShardwiseError("the machine is closed", remedy="get() and submit() before close()"))
            for place in self.places:
                for stream in place.streams:
                    stream.close()
                place.memory.close()
            self.imports.close()

    def _made(self, like: Tensor, name: str | None) -> Data:
        self._num_data += 1
        made = Data(
            keeper=self,
            name=name or f"data{self._num_data}",
            number=self._num_data,
            shape=tuple(like.shape),
            strides=tuple(like.stride()),
            dtype=like.dtype,
            num_bytes=like.numel() * like.element_size(),
            copies=[None] * len(self.places),
        )
        self._known.add(made)
        return made

    def _drop_forgotten(self) -> None:
        while self._forgotten:
            for copy in self._forgotten.popleft():
                if copy is not None:
                    self.mover.drop(copy)

    def _wait_for(self, event: Event) -> None:
        event.wait()
        if self.mover.journal is not None:
            self.mover.journal.host_waited(event)

    def _raise_failure(self) -> None:
        if self.failures.first is not None:
            raise self.failures.first
