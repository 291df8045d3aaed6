"""What data parallelism has to know of tensor parallelism: `sharding.tensor.sharding.Sharding` is one of these."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise.ranks.exchange import Exchange
from shardwise.states.buckets.bucket import Bucket


class Joining(Protocol):
    """Whole parameters from the parts of ranks that are no replicas of each other, and back."""

    def of(self, name: str) -> Any:
        """How one lies; its `shape` is that of the whole."""
        ...

    def gather(self, name: str, local: Tensor) -> Tensor: ...

    def local(self, name: str, whole: Tensor) -> Tensor: ...


class TensorInterface(Protocol):
    """How parameters lie on tensor parallel ranks."""

    @property
    def partial(self) -> frozenset[str]:
        """Parameters of whose gradients each rank has a part only."""
        ...

    def of(self, name: str) -> Any:
        """How one lies; its `shape` is that of the whole."""
        ...

    def gather(self, name: str, local: Tensor) -> Tensor: ...

    def local(self, name: str, whole: Tensor) -> Tensor: ...

    def counted(self, name: str, local: Tensor) -> Tensor: ...

    def finish_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None: ...


def counted_places(tensor: TensorInterface | None, name: str, shape: torch.Size) -> Tensor | None:
    """The places of a parameter that this rank counts, where every number is counted once; None for all of them."""
    if tensor is None:
        return None
    numbers = torch.arange(shape.numel()).view(shape)
    kept = tensor.counted(name, numbers).reshape(-1)
    return None if len(kept) == len(numbers.view(-1)) else kept


@torch.no_grad()
def sum_partial(
    tensor: TensorInterface, buckets: list[Bucket], exchange: Exchange, channel_of: Callable[[Bucket], int]
) -> None:
    """Sum the gradients of which each tensor parallel rank has a part. They are few and small: norms, key heads."""
    carriers: dict[str, nn.Parameter] = {}
    wholes: list[Tensor] = []
    for bucket in buckets:
        whole = bucket.result
        if not bucket.updates_whole:
            whole = bucket.result.new_empty(bucket.layout.length)
            exchange.gather(whole, bucket.result.clone(), bucket.sharing, channel_of(bucket)).wait()
        wholes.append(whole)
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
