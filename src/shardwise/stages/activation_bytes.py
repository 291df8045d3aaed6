"""Count the bytes that a forward saves for its backward."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.torch_private import storage_id


class Kept:
    """Counts what autograd saves while graphs are built: each storage once, except those of `there_anyway`."""

    def __init__(self, there_anyway: Iterable[Tensor]) -> None:
        self._there = {storage_id(each.untyped_storage()) for each in there_anyway}
        # While a weak reference to a storage exists, no other storage can have its id.
        self._seen: dict[int, StorageWeakRef] = {}
        self.num_bytes = 0

    def counting(self) -> AbstractContextManager[Any]:
        """Return a context in which saved tensors are counted. They are saved unchanged."""
        return torch.autograd.graph.saved_tensors_hooks(self.count, lambda tensor: tensor)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that are kept without autograd."""
        for tensor in tensors:
            self.count(tensor)

    def new_bytes(self, tensor: Tensor) -> int:
        """Return the bytes of a tensor's storage the first time it is seen, then 0. The caller adds them up."""
        storage = tensor.untyped_storage()
        number = storage_id(storage)
        if number in self._seen or number in self._there:
            return 0
        self._seen[number] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return storage.nbytes()

    def count(self, tensor: Tensor) -> Tensor:
        self.num_bytes += self.new_bytes(tensor)
        # Detached: a node that saves its own output with its graph is never freed. Autograd restores the graph itself.
        return tensor.detach()


#: The bytes that a forward of each stage saves. A missing stage is counted when it runs next.
KeptBytes = dict[int, int]
