"""What data parallelism needs of tensor parallelism: `sharding.tensor.sharding.Sharding` implements it."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise.states.buckets.bucket import Bucket


class Joining(Protocol):
    """Assembles whole parameters from the parts of ranks that are not replicas of each other, and cuts them again."""

    def of(self, name: str) -> Any:
        """Return how a parameter is sharded; its `shape` is the whole."""
        ...

    def gather(self, name: str, local: Tensor) -> Tensor: ...

    def local(self, name: str, whole: Tensor) -> Tensor: ...


class TensorInterface(Joining, Protocol):
    """How parameters are sharded over tensor parallel ranks."""

    @property
    def partial(self) -> frozenset[str]:
        """Parameters of whose gradients each rank has a partial sum."""
        ...

    def counted(self, name: str, local: Tensor) -> Tensor: ...

    def finish_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None: ...


@torch.no_grad()
def sum_partial(tensor: TensorInterface, buckets: list[Bucket]) -> None:
    """Sum the partial gradients over tensor parallel ranks. They are few and small: norms, key heads."""
    carriers: dict[str, nn.Parameter] = {}
    wholes = [bucket.gather(bucket.result) for bucket in buckets]
    for bucket, whole in zip(buckets, wholes, strict=True):
        for slot in bucket.layout.slots:
            place = whole[slot.start : slot.stop].view(slot.shape)
            carriers[slot.name] = nn.Parameter(torch.empty_like(place))
            carriers[slot.name].grad = place
    tensor.finish_gradients(carriers)
    for bucket, whole in zip(buckets, wholes, strict=True):
        for slot in bucket.layout.slots:
            summed = carriers[slot.name].grad
            assert summed is not None, "a sum was made"
            whole[slot.start : slot.stop] = summed.reshape(-1)
        if not bucket.updates_whole:
            bucket.result.copy_(whole.view(bucket.sharing.size, -1)[bucket.sharing.rank])
