"""What a forward keeps for its backward, in bytes."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.torch_private import storage_id


class Kept:
    """Counts what autograd saves while graphs are built: each storage once, and none of what is there anyway."""

    def __init__(self, there_anyway: Iterable[Tensor]) -> None:
        self._there = {storage_id(each.untyped_storage()) for each in there_anyway}
        # While memory is referred to, weakly, no other can have its number.
        self._seen: dict[int, StorageWeakRef] = {}
        self.num_bytes = 0

    def counting(self) -> AbstractContextManager[Any]:
        """Where what is saved is counted. It is saved as it is."""
        return torch.autograd.graph.saved_tensors_hooks(self.count, lambda tensor: tensor)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that are kept without autograd."""
        for tensor in tensors:
            self.count(tensor)

    def new_bytes(self, tensor: Tensor) -> int:
        """The bytes of a tensor's memory, the first time that it is seen; whoever asks counts them."""
        storage = tensor.untyped_storage()
        number = storage_id(storage)
        if number in self._seen or number in self._there:
            return 0
        self._seen[number] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return storage.nbytes()

    def count(self, tensor: Tensor) -> Tensor:
        self.num_bytes += self.new_bytes(tensor)
        # A node that holds its own output, with that output's node, is never freed. Autograd puts it back itself.
        return tensor.detach()


#: The bytes that a forward of each stage keeps; what is not in it yet is counted when it is run next.
KeptBytes = dict[int, int]
