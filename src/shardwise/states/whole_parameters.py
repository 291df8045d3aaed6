"""Assemble whole parameters and gradients by name from the pieces of replicas. Replicas call these alike."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from shardwise.ranks.exchange import Exchange
from shardwise.states.buckets.bucket import Bucket


class WholeParameters:
    """The parameters of this rank's stages. Those that are in no bucket are whole on every rank."""

    def __init__(self, buckets: Sequence[Bucket], parameters: Mapping[str, nn.Parameter], exchange: Exchange) -> None:
        self._buckets, self._parameters, self._exchange = buckets, parameters, exchange
        self._places = {slot.name: (bucket, slot) for bucket in buckets for slot in bucket.layout.slots}

    def is_offloaded(self, name: str) -> bool:
        """Whether a parameter lives on the host."""
        return name in self._places and self._places[name][0].is_offloaded

    def shape_of(self, name: str) -> torch.Size:
        """Return the shape of a parameter on tensor and expert parallel ranks, joined over the replicas' pieces."""
        return self._places[name][1].shape

    @torch.no_grad()
    def weight(self, name: str) -> Tensor:
        """Return a parameter as it is used in computation."""
        if name not in self._places:
            return self._parameters[name].detach().clone()
        bucket, slot = self._places[name]
        bucket.weights.hold("whole")
        numbers = bucket.weights.whole[slot.start : slot.stop].view(slot.shape).clone()
        bucket.weights.let_go("whole")
        return numbers

    @torch.no_grad()
    def kept(self, name: str) -> Tensor:
        """Return a parameter in the optimizer's precision."""
        if name not in self._places:
            return self._parameters[name].detach().clone()
        bucket, slot = self._places[name]
        self._exchange.settle()
        return bucket.gather(bucket.kept.to(bucket.key.device))[slot.start : slot.stop].view(slot.shape).clone()

    @torch.no_grad()
    def gradient(self, name: str, used: Mapping[Bucket, Sequence[bool]]) -> Tensor | None:
        """Return the gradient of a parameter in the last step, as the optimizer received it; None if it had none."""
        bucket, slot = self._places[name]
        number = bucket.layout.slots.index(slot)
        if bucket.gradients is None or not used or not used[bucket][number]:
            return None
        if bucket.local is not None:
            found = bucket.local.find(number)
            return None if found is None else found.clone()
        return bucket.gather(bucket.given)[slot.start : slot.stop].view(slot.shape).clone()

    def pieces(self) -> Iterator[tuple[str, torch.Size, int, Tensor]]:
        """Yield what this rank updates: name, shape of the whole, start of the piece in it, and its values."""
        for bucket in self._buckets:
            for span in bucket.updated(bucket.sharing.rank):
                yield span.slot.name, span.slot.shape, span.start, bucket.kept[span.at : span.at + span.length]

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Load whole parameters into the pieces that this rank updates."""
        for name, whole in values.items():
            bucket, slot = self._places[name]
            bucket.load(slot, whole)
