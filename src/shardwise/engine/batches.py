"""This process's part of a batch: its rows (dp), cut into microbatches, and its tokens of these (cp)."""

from dataclasses import replace

import torch
from torch import Tensor

from shardwise.engine.rank_device import batch_on
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.ranks.mesh import Mesh
from shardwise.sharding.context.parallel import ContextParallel
from shardwise.sharding.context.sequence_shards import LocalBatch
from shardwise.sharding.dropout import Place, num_tokens_of
from shardwise.sharding.zigzag import zigzag_shard
from shardwise.stages.batch import cut_batch, length_of
from shardwise.stages.stage import Batch


class Batches:
    """Takes the part of this process. Every process is given the same batch."""

    def __init__(
        self, plan: Plan, mesh: Mesh, *, device: torch.device, pad: bool, context: ContextParallel | None
    ) -> None:
        self._plan, self._mesh, self._device, self._pad, self._context = plan, mesh, device, pad, context

    def cut(self, batch: Batch, *, predicts: bool = False) -> list[Batch]:
        """The microbatches of this process, on its device. `predicts`: nobody takes a loss of them."""
        rows = batch_on(rows_of(batch, self._plan, self._mesh), self._device)
        microbatches = cut_batch(rows, self._plan.microbatches, pad=self._pad)
        return (
            microbatches
            if self._context is None
            else [self._context.cut(each, predicts=predicts) for each in microbatches]
        )

    def place(self, batch: Batch, microbatch: Batch, step: int) -> Place:
        """Where the first microbatch of this process stands in a batch."""
        axes, plan = self._mesh.coordinates, self._plan
        place = Place(step=step, first_row=0, num_tokens=num_tokens_of(microbatch))
        if plan.num_ranks == plan.pp:
            return place
        tokens: Tensor | None = None
        if isinstance(microbatch, LocalBatch):
            tokens = zigzag_shard(torch.arange(microbatch.tokens.length), 0, axes["cp"], plan.cp)
        first_row = axes["dp"] * (length_of(batch) // plan.dp)
        num_pieces = plan.tp if plan.sp else 1
        return replace(place, first_row=first_row, tokens=tokens, piece=axes["tp"] % num_pieces, num_pieces=num_pieces)


def rows_of(batch: Batch, plan: Plan, mesh: Mesh) -> Batch:
    """The rows of this process's replica."""
    if plan.dp == 1:
        return batch
    length = length_of(batch)
    if length % plan.dp:
        below = length - length % plan.dp
        raise ShardwiseError(
            f"a batch of {length} cannot be shared out evenly over dp={plan.dp} replicas",
            remedy=f"a batch of {' or '.join(str(each) for each in (below, below + plan.dp) if each)}",
        )
    return cut_batch(batch, plan.dp)[mesh.coordinates["dp"]]
