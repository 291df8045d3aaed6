"""What a forward keeps for its backward, in bytes."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


class Kept:
    """Counts what autograd saves while graphs are built: each storage once, and none of what is there anyway."""

    def __init__(self, there_anyway: Iterable[Tensor]) -> None:
        self._seen = {_place(each) for each in there_anyway}
        self.num_bytes = 0

    def counting(self) -> AbstractContextManager[Any]:
        """Where what is saved is counted. It is saved as it is."""
        return torch.autograd.graph.saved_tensors_hooks(self.count, _as_it_is)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that are kept without autograd."""
        for tensor in tensors:
            self.count(tensor)

    def count(self, tensor: Tensor) -> Tensor:
        place = _place(tensor)
        if place not in self._seen:
            self._seen.add(place)
            self.num_bytes += tensor.untyped_storage().nbytes()
        # A node that holds its own output, with that output's node, is never freed. Autograd puts it back itself.
        return tensor.detach()


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


#: The bytes that a forward of each stage keeps; what is not in it yet is counted when it is run next.
KeptBytes = dict[int, int]
