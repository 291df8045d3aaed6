"""What is trained twice: a module, a batch for each step, and a loss; and how torch is set for small ones."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from shardwise.engine.rank_device import batch_on, put_on
from shardwise.planner.plan import Plan
from shardwise.stages.batch import cut_batch, length_of
from shardwise.stages.stage import Batch, Loss

#: Gradients are clipped to this norm, so that clipping is compared too.
CLIP = 0.5


#: What `parallelize` may be told of a module.
OPTIONS = ("tensor", "tensor_chunks", "positions", "entries", "masks", "through_blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A module in training mode, its batches, one for each step, and `loss(output, batch)`.

    `options` is what `parallelize` is told of it.
    """

    module: nn.Module
    batches: Sequence[Batch]
    loss: Loss
    options: Mapping[str, Any] = field(default_factory=dict)

    def on(self, device: str) -> "Problem":
        """The same on a device."""
        put_on(self.module, torch.device(device))
        return replace(self, batches=[batch_on(each, torch.device(device)) for each in self.batches])


#: Makes the same problem in every process: it is sent to ranks, which make their own.
MakeProblem = Callable[[], Problem]


def make_optimizer(parameters: Iterable[nn.Parameter]) -> AdamW:
    """AdamW. Where a gradient is zero but for rounding, a step must not blow the rounding up: so eps is not small."""
    return AdamW(parameters, lr=1e-3, eps=1e-4, weight_decay=0.1)


def clip_factor(norm: float) -> float:
    """What gradients of this norm are multiplied by."""
    return min(1.0, CLIP / (norm + 1e-6))


def microbatches_of(batch: Batch, plan: Plan, *, apart: bool) -> list[Batch]:
    """The microbatches of a plan as one device sees them: each of all replicas together, or every replica's `apart`."""
    pieces = cut_batch(batch, plan.dp * plan.microbatches)
    if apart:
        return pieces
    return [_together(pieces[number :: plan.microbatches], batch) for number in range(plan.microbatches)]


def _together(pieces: Sequence[Batch], batch: Batch) -> Batch:
    length = length_of(batch)
    return {
        name: torch.cat([piece[name] for piece in pieces])
        if isinstance(entry, Tensor) and entry.dim() and entry.shape[0] == length
        else entry
        for name, entry in batch.items()
    }


@contextmanager
def small_matrices() -> Iterator[None]:
    """Compute without oneDNN: it takes 0.6 ms for any matrix, however small (aarch64, torch 2.13)."""
    before = bool(torch.backends.mkldnn.enabled)
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before  # type: ignore[assignment]
