"""The part of the gradient's norm that a rank counts: over all ranks every number of the model is counted once."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from shardwise.states.buckets.bucket import Bucket
from shardwise.states.buckets.offloaded_buckets import host_gradients
from shardwise.torch_private import foreach_norm

#: Of a parameter on this rank, by name and shape: the places in it, flattened, that this rank counts; None for all.
Counted = Callable[[str, torch.Size], Tensor | None]


#: From where to where in this rank's piece of a bucket, and which places there.
Part = tuple[int, int, Tensor | None]


class GradientNorm:
    """Knows what to count of each bucket: this rank's piece of it, on one of its copies, on one of its tied ranks."""

    def __init__(self, buckets: Sequence[Bucket], *, is_counted: Callable[[Bucket], bool], counted: Counted) -> None:
        self._parts: list[tuple[Bucket, list[Part]]] = []
        for bucket in buckets:
            replicas = bucket.home.replicas
            if bucket.gradients is None or replicas.copies.rank or not is_counted(bucket):
                continue
            parts: list[Part] = []
            for span in bucket.layout.spans(replicas.shard.rank):
                kept = counted(span.slot.name, span.slot.shape)
                if kept is not None:
                    kept = kept[(kept >= span.start) & (kept < span.stop)] - span.start
                if kept is None or len(kept):
                    parts.append((span.at, span.at + span.length, kept))
            self._parts.append((bucket, parts))

        every = [bucket for bucket, parts in self._parts if parts]
        self._wide = torch.float64 if any(each.home.dtype is torch.float64 for each in every) else torch.float32

    def measure_on_the_way(self) -> None:
        """Have what goes to the host measured by the device before it goes."""
        for bucket, parts in self._parts:
            if bucket.is_offloaded:
                host_gradients(bucket).measure = partial(self._norms, parts)

    @torch.no_grad()
    def square(self) -> Tensor:
        """The sum of the squares of what this rank counts."""
        norms = self._all_norms(
            [
                found
                for bucket, _ in self._parts
                if bucket.local is not None
                for number in range(len(bucket.layout.slots))
                if (found := bucket.local.find(number)) is not None
            ]
        )
        for bucket, parts in self._parts:
            if bucket.is_offloaded:
                host_gradients(bucket).wait()
                norms += host_gradients(bucket).norms
            elif bucket.local is None:
                norms += self._norms(parts, bucket.trained.own)
        return torch.stack(norms).double().square().sum().cpu() if norms else torch.zeros((), dtype=torch.float64)

    def _norms(self, parts: Sequence[Part], own: Tensor) -> list[Tensor]:
        """The norm of each part of this rank's piece of a bucket."""
        chosen = [own[start:stop] if kept is None else own[start:stop][kept] for start, stop, kept in parts]
        return self._all_norms(chosen)

    def _all_norms(self, chosen: list[Tensor]) -> list[Tensor]:
        return foreach_norm(chosen, self._wide) if chosen else []
