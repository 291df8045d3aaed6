"""The gradients of a step made complete: summed over all that add to them, measured, and multiplied."""

from collections.abc import Collection, Mapping, Sequence

import torch

from shardwise.ranks.exchange import Exchange
from shardwise.states.buckets.bucket import Bucket
from shardwise.states.buckets.gradient_norm import GradientNorm
from shardwise.states.buckets.gradients import scale_all
from shardwise.states.buckets.make import ParameterOwners
from shardwise.states.buckets.tensor_interface import sum_partial
from shardwise.states.buckets.ties import TieSums
from shardwise.states.buckets.unused_parameters import UnusedParameters


class StepGradients:
    """Those of the buckets of a rank that are trained. `done` are buckets that were updated already in this step."""

    def __init__(self, buckets: Sequence[Bucket], owners: ParameterOwners, exchange: Exchange) -> None:
        self._local = [bucket.local for bucket in buckets if bucket.local is not None]
        self._summed = [bucket for bucket in buckets if bucket.local is None]
        self._tensor = owners.tensor
        self.ties = TieSums(owners.ties, buckets, exchange)
        self.norm = GradientNorm(buckets, self.ties.is_counted, owners.tensor)
        self._unused = UnusedParameters(buckets, owners.ties, exchange)
        #: Which parameters of each bucket had a gradient in the last step that was finished, on any replica.
        self.used: Mapping[Bucket, list[bool]] = {}

    @torch.no_grad()
    def finish(self, step: int, done: Collection[Bucket]) -> None:
        """Wait until this rank's gradients of a step are the sums over all replicas, and over tied stages."""
        self.ties.finish_local(step)
        self._unused.start(step)
        for bucket in self._summed:
            if bucket not in done:
                bucket.trained.finish(step)
        self.ties.sum_shards()
        partial = [bucket for bucket in self._summed if bucket.key.is_partial]
        if self._tensor is not None and partial:
            sum_partial(self._tensor, partial)
        self.used = self._unused.read()

    @torch.no_grad()
    def scale(self, factor: float, done: Collection[Bucket]) -> None:
        """Multiply them."""
        scale_all(self._local, factor)
        for bucket in self._summed:
            if bucket not in done:
                bucket.scale(factor)

    def close(self) -> None:
        """Let go of the groups."""
        self._unused.close()
