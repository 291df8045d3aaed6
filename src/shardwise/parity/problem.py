"""The problem that is trained twice: a module, a batch for each step, and a loss; and torch's setup for small ones."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from shardwise.engine.rank_device import batch_on, put_on
from shardwise.kernels.choose import settle
from shardwise.planner.plan import Plan
from shardwise.stages.batch import cut_batch, length_of
from shardwise.stages.stage import Batch, Loss
from shardwise.states.parameter_group import MakeOptimizer, Share

#: The default norm to which gradients are clipped, so that clipping is compared too.
CLIP = 0.5
#: The approximate number of gradient buckets, so that there are several, and a last one that is not full.
_NUM_BUCKETS = 4
_LEAST_BUCKET_BYTES = 256

#: The options of `parallelize` about a module.
OPTIONS = ("tensor", "tensor_chunks", "positions", "entries", "masks", "through_blocks", "buffers")

#: Makes a scheduler of the learning rate, which is stepped after every step.
MakeScheduler = Callable[[Optimizer], LRScheduler]


def make_optimizer(parameters: Iterable[nn.Parameter]) -> AdamW:
    """Return AdamW with two groups, as in most recipes: weight decay for matrices, another rate for the rest.

    A step must not amplify gradients that are zero except for rounding, so eps is not small.
    """
    every = list(parameters)
    groups = [
        {"params": [each for each in every if each.dim() > 1], "weight_decay": 0.1},
        {"params": [each for each in every if each.dim() <= 1], "weight_decay": 0.0, "lr": 2e-3},
    ]
    return AdamW([group for group in groups if group["params"]], lr=1e-3, eps=1e-4)


def make_scheduler(optimizer: Optimizer) -> LRScheduler:
    """Return a scheduler with a different rate in every step: up for three, and then down."""
    return LambdaLR(optimizer, lambda step: min((step + 1) / 3, 3 / (step + 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A module in training mode, its batches, one for each step, and `loss(output, batch)`.

    `held_out` is the batch to evaluate, by default the last one. `options` are those of `parallelize` for the module.
    `by_microbatches`: one device computes the plan's microbatches instead of whole batches. `left_out` describes the
    parts of the module that are not compared.
    """

    module: nn.Module
    batches: Sequence[Batch]
    loss: Loss
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: MakeOptimizer | Sequence[Share] = make_optimizer
    scheduler: MakeScheduler | None = make_scheduler
    clip: float | None = CLIP
    held_out: Batch | None = None
    by_microbatches: bool = False
    left_out: Sequence[str] = ()

    @property
    def evaluated(self) -> Batch:
        """The batch that is evaluated."""
        return self.batches[-1] if self.held_out is None else self.held_out

    @property
    def bucket_bytes(self) -> int:
        """The size of buckets, such that there is more than one."""
        return max(_LEAST_BUCKET_BYTES, sum(each.nbytes for each in self.module.parameters()) // _NUM_BUCKETS)

    def without_kernels(self) -> nn.Module:
        """Return the module, computed by definitions without kernels, as the reference for kernels."""
        settle(self.module, self.loss, kernels=False)
        return self.module

    def on(self, device: str) -> "Problem":
        """Return the same problem on a device."""
        put_on(self.module, torch.device(device))
        batches = [batch_on(each, torch.device(device)) for each in self.batches]
        held_out = None if self.held_out is None else batch_on(self.held_out, torch.device(device))
        return replace(self, batches=batches, held_out=held_out)


#: Makes the same problem in every process: it is sent to ranks, which make their own.
MakeProblem = Callable[[], Problem]


def clip_factor(norm: float, clip: float | None) -> float:
    """Return the clipping factor for gradients of this norm."""
    return 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))


def microbatches_of(batch: Batch, plan: Plan, *, apart: bool) -> list[Batch]:
    """Return a plan's microbatches as one device sees them: each over all replicas, or `apart` for each replica."""
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
