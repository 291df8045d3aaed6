"""Imported tensors: a user's memory is used in place, and returned to the user when the machine is closed."""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.dataflow.buffers import LEAST_PINNED_BYTES, host_memory, pin, unpin
from shardwise.dataflow.data import Copy, Data
from shardwise.dataflow.place import Kind, Place
from shardwise.errors import ShardwiseError
from shardwise.torch_private import version_of


class Imports:
    """Maps users' tensors to data."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = {place.device: place for place in places if place.kind is Kind.GPU}
        self._host, self._disk = places[-2], places[-1]
        #: Data in users' tensors that tasks have written, by number: these tensors are out of date.
        self.changed: dict[int, Data] = {}
        self._by_storage: dict[int, list[weakref.ref[Data]]] = {}  # By the address of the storage.
        self._pinned: list[Tensor] = []

    def find(self, tensor: Tensor) -> Data | None:
        """Return the data of this very tensor if it was imported before."""
        for data in self._in_storage(tensor):
            home = home_of(data)
            if home is not None and home.imported is tensor:
                return data
        return None

    def add(self, data: Data, tensor: Tensor, *, on_disk: bool) -> None:
        """Make a user's tensor the first copy of new data."""
        if not _is_dense(tensor):
            raise ShardwiseError(
                f"{data.name} has gaps, or the same memory twice: shape {list(tensor.shape)} with strides"
                f" {list(tensor.stride())}",
                remedy="machine.data(tensor.contiguous())",
            )
        for other in self._in_storage(tensor):
            if _overlap(tensor, home_of(other)):
                data.unwritable, other.unwritable = (f"shares its memory with {each.name}" for each in (other, data))
        place = self._disk if on_disk else self._place_for(data.name, tensor)
        if place is self._disk:
            data.unwritable = "is a file that is only read"
        copy = data.copies[place.index] = Copy(weakref.ref(data), place.index, data.num_bytes, tensor.data, None)
        copy.valid, copy.imported, copy.imported_version = True, tensor, version_of(tensor)
        data.is_imported = True
        self._by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(weakref.ref(data))

    def renew(self, data: Data, tensor: Tensor) -> None:
        """Accept a new value from the user: modifications of the tensor up to now are known."""
        home = home_of(data)
        if home is not None and home.imported is not None:
            home.imported_version = version_of(home.imported)
            if tensor is home.imported:
                self.changed.pop(data.number, None)

    def pinned(self, like: Tensor) -> Tensor:
        """Return a host tensor, pinned if there is a GPU."""
        allocate, _ = host_memory(is_pinned=bool(self._places))
        storage = allocate(like.numel() * like.element_size())
        if storage.numel() >= LEAST_PINNED_BYTES:
            self._pinned.append(storage)
        return storage.view(like.dtype).view(like.shape)

    def close(self) -> None:
        """Unpin the memory that was pinned here."""
        for tensor in self._pinned if self._places else ():
            unpin(tensor)
        self._pinned.clear()

    def _place_for(self, name: str, tensor: Tensor) -> Place:
        if tensor.device.type != "cpu":
            found = self._places.get(tensor.device)
            if found is None:
                known = ", ".join(map(str, self._places)) or "none"
                raise ShardwiseError(
                    f"{name} is on {tensor.device}, which is not a place of this machine (GPUs: {known})",
                    remedy=f'Machine(["{tensor.device}"]), or machine.data(tensor.cpu())',
                )
            # Wait for what the user's current stream still does to the tensor.
            current = torch.cuda.current_stream(tensor.device)
            found.compute.cuda.wait_stream(current)  # type: ignore[attr-defined]
            return found
        is_large = tensor.numel() * tensor.element_size() >= LEAST_PINNED_BYTES
        if self._places and is_large and not tensor.is_pinned():
            if not pin(tensor):
                return self._disk  # A read-only file mapping: treat it as a file, which a thread reads.
            self._pinned.append(tensor)
        return self._host

    def _in_storage(self, tensor: Tensor) -> list[Data]:
        known = self._by_storage.get(tensor.untyped_storage().data_ptr(), [])
        return [data for each in known if (data := each()) is not None]


def home_of(data: Data) -> Copy | None:
    """Return the copy that is a user's tensor, if there is one."""
    return next((copy for copy in data.copies if copy is not None and copy.imported is not None), None)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill its memory without gaps or overlap, in any order of dims."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return tensor.layout is torch.strided


def _overlap(tensor: Tensor, home: Copy | None) -> bool:
    if home is None:
        return False
    begin, other = tensor.data_ptr(), home.tensor.data_ptr()
    return begin < other + home.num_bytes and other < begin + tensor.numel() * tensor.element_size()
