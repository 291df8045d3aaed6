"""The part of the gradient's norm that a rank counts: over all ranks every number of the model is counted once."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise.runtime.data.bucket import Bucket

#: Of a parameter on this rank, by name and shape: the places in it, flattened, that this rank counts; None for all.
Counted = Callable[[str, torch.Size], Tensor | None]


class Norm:
    """Knows what to count of each bucket: this rank's piece of it, on one of its copies, on one of its tied ranks."""

    def __init__(self, buckets: Sequence[Bucket], *, is_counted: Callable[[Bucket], bool], counted: Counted) -> None:
        self._parts: list[tuple[Bucket, list[tuple[int, int, Tensor | None]]]] = []
        for bucket in buckets:
            replicas = bucket.home.replicas
            if bucket.gradients is None or replicas.copies.rank or not is_counted(bucket):
                continue
            parts = []
            for span in bucket.layout.spans(replicas.shard.rank):
                kept = counted(span.slot.name, span.slot.shape)
                if kept is not None:
                    kept = kept[(kept >= span.start) & (kept < span.stop)] - span.start
                if kept is None or len(kept):
                    parts.append((span.at, span.at + span.length, kept))
            self._parts.append((bucket, parts))

    @torch.no_grad()
    def square(self) -> Tensor:
        """The sum of the squares of what this rank counts."""
        chosen = []
        for bucket, parts in self._parts:
            own = bucket.trained.own
            for start, stop, kept in parts:
                chosen.append(own[start:stop] if kept is None else own[start:stop][kept])
        if not chosen:
            return torch.zeros((), dtype=torch.float64)
        wide = torch.float64 if any(each.dtype is torch.float64 for each in chosen) else torch.float32
        norms = torch._foreach_norm(chosen, 2, dtype=wide)  # type: ignore[call-arg, unused-ignore]
        return torch.stack(norms).double().square().sum().cpu()
