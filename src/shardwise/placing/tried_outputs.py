"""Each output of a small module, tried as a loss: an example may hide how rows meet, and hooks may not be linear."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.placing.batch_rows import rows_of
from shardwise.stages.backward_trial import is_linear
from shardwise.stages.loss_kind import LossKind
from shardwise.stages.loss_trial import try_loss
from shardwise.stages.rows import RowRule
from shardwise.stages.rows_apart import Way
from shardwise.stages.stage import Batch, Loss
from shardwise.stages.whole_step import is_quick
from shardwise.torch_private import accumulated_hooks, gradient_hooks, pytree

#: So many outputs are tried at most.
_MOST = 4
_WAYS: Mapping[LossKind, Way] = {
    LossKind.ROWS: "mean", LossKind.SUM: "sum", LossKind.LABELS: "labels", LossKind.EVEN: "even",
}  # fmt: skip


def tried_ways(module: nn.Module, batch: Batch, remedy: str) -> Mapping[int, Way]:
    """Return how numbers of the output are joined, by place, where that was found; refuse one that parts do not
    tell."""
    if rows_of(batch) < 2 or not is_quick(module, batch, 1 / 8) or not torch.is_grad_enabled():
        return {}
    leaves: dict[int, int] = {}
    found: dict[int, Way] = {}
    try:
        try_loss(module, _noted(leaves), batch, RowRule())
        every = [
            # The script's own loss begins the backward of each row alike, and that of a number by its weight.
            try_loss(module, _loss_of(number), batch, RowRule(), num_parts=2, starts=not dims)
            for number, dims in islice(leaves.items(), _MOST)
        ]
    except ShardwiseError:  # Of a batch whose rows it cannot find, or of the module: the forward reports it.
        return {}
    for number, tried in zip(leaves, every, strict=False):
        problem = tried.problem
        if problem is None and tried.kind is LossKind.ENTRY:
            problem = "it is a mean by something of the batch, which microbatches have different amounts of"
        if problem is not None:
            raise ShardwiseError(
                f"value {number + 1} of the module's output cannot be joined from microbatches. As a loss: {problem}",
                remedy=remedy,
            )
        if tried.kind in _WAYS:
            found[number] = _WAYS[tried.kind]
    return found


def _noted(leaves: dict[int, int]) -> Loss:
    """Return a loss that notes which values of an output may have a gradient, with their numbers of dims."""

    def note(output: Any, _: Batch) -> Tensor:
        for number, each in enumerate(pytree.tree_leaves(output)):
            if isinstance(each, Tensor) and each.is_floating_point() and each.numel():
                leaves[number] = each.dim()
        return torch.zeros(())

    return note


def _loss_of(number: int) -> Loss:
    """Return one value of an output as a loss: a number itself, and of rows a sum in which no means cancel."""

    def loss(output: Any, _: Batch) -> Tensor:
        value: Tensor = pytree.tree_leaves(output)[number]
        if not value.dim():
            return value
        rows = value.flatten(1) if value.dim() > 1 else value[:, None]
        weights = torch.arange(1, rows.shape[1] + 1, device=rows.device).cos().to(rows.dtype)
        found: Tensor = (rows * weights).sum(1) + rows.square().mean(1)
        return found.sum()

    return loss


def check_hooks(module: nn.Module) -> None:
    """Refuse hooks of parameters that make something else of the gradients of microbatches than of their sum."""
    for name, each in module.named_parameters():
        late, hooks = accumulated_hooks(each), list(gradient_hooks(each).values())
        if late or (hooks and not is_linear(hooks, each)):
            which = "register_post_accumulate_grad_hook" if late else "register_hook"
            raise ShardwiseError(
                f"a hook of {name} ({which}) would be called with the gradient of each microbatch, and does not make of"
                " their sum what it makes of them",
                remedy="what it does between loss.backward() and optimizer.step(); or microbatches=1",
            )
