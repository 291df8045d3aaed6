"""The part of the gradient's norm that a rank counts: over all ranks every number of the model is counted once."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from shardwise.states.buckets.bucket import Bucket
from shardwise.states.buckets.flat_layout import Slot
from shardwise.states.buckets.tensor_interface import TensorInterface
from shardwise.torch_private import foreach_norm

#: From where to where in this rank's piece of a bucket, and which places there.
Part = tuple[int, int, Tensor | None]


class GradientNorm:
    """Knows what to count of each bucket: this rank's piece of it, on one of its copies, on one of its tied ranks."""

    def __init__(
        self, buckets: Sequence[Bucket], is_counted: Callable[[Bucket], bool], tensor: TensorInterface | None
    ) -> None:
        self._parts: list[tuple[Bucket, list[Part]]] = []
        for bucket in buckets:
            replicas = bucket.key.replicas
            if bucket.gradients is None or replicas.copies.rank or not is_counted(bucket):
                continue
            parts: list[Part] = []
            for span in bucket.layout.spans(replicas.shard.rank):
                kept = _counted_places(tensor, span.slot)
                if kept is not None:
                    kept = kept[(kept >= span.start) & (kept < span.stop)] - span.start
                if kept is None or len(kept):
                    parts.append((span.at, span.at + span.length, kept))
            self._parts.append((bucket, parts))

        every = [bucket for bucket, parts in self._parts if parts]
        self._wide = torch.float64 if any(each.key.dtype is torch.float64 for each in every) else torch.float32

    def measure_on_the_way(self) -> None:
        """Have what goes to the host measured by the device before it goes."""
        for bucket, parts in self._parts:
            if bucket.is_offloaded:
                bucket.host_gradients.measure = partial(self._norms, parts)

    @torch.no_grad()
    def square(self) -> Tensor:
        """The sum of the squares of what this rank counts."""
        local = [bucket.local for bucket, _ in self._parts if bucket.local is not None]
        norms = self._all_norms([each for one in local for each in one.found])
        for bucket, parts in self._parts:
            if bucket.is_offloaded:
                bucket.host_gradients.wait()
                norms += bucket.host_gradients.norms
            elif bucket.local is None:
                norms += self._norms(parts, bucket.trained.own)
        return torch.stack(norms).double().square().sum().cpu() if norms else torch.zeros((), dtype=torch.float64)

    def _norms(self, parts: Sequence[Part], own: Tensor) -> list[Tensor]:
        """The norm of each part of this rank's piece of a bucket."""
        return self._all_norms([own[start:stop] if at is None else own[start:stop][at] for start, stop, at in parts])

    def _all_norms(self, chosen: list[Tensor]) -> list[Tensor]:
        return foreach_norm(chosen, self._wide) if chosen else []


def _counted_places(tensor: TensorInterface | None, slot: Slot) -> Tensor | None:
    """The places of a parameter that this rank counts, where every number is counted once; None for all of them."""
    if tensor is None:
        return None
    numbers = torch.arange(slot.shape.numel()).view(slot.shape)
    kept = tensor.counted(slot.name, numbers).reshape(-1)
    return None if len(kept) == numbers.numel() else kept
