"""A bucket: weights, their gradients, and the pieces that an optimizer updates."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.ranks.collectives import Group
from shardwise.ranks.mesh import Replicas
from shardwise.states.buckets.flat_layout import BucketSpec, Slot, Span
from shardwise.states.buckets.gradients import LocalGradients, ScatteredGradients, WholeGradients
from shardwise.states.buckets.offloaded_gradients import HostGradients, OffloadedGradients
from shardwise.states.buckets.offloaded_weights import OffloadedWeights, OffloadedWhole
from shardwise.states.buckets.weights import Weights
from shardwise.states.scaling import multiply
from shardwise.torch_private import version_of

AnyGradients = WholeGradients | ScatteredGradients | LocalGradients
#: The channels of each bucket: gathers, sums over shards, sums over copies, and other transfers.
CHANNELS_OF_A_BUCKET, OTHER_TRANSFERS = 4, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketKey:
    """The common properties of a bucket's parameters.

    `stages` of this rank use them; `unit` uses them, if weights are gathered unit by unit; `tie` is the number of the
    tie with stages of other ranks. `is_partial`: each tensor parallel rank has a partial sum of their gradients.
    """

    stages: frozenset[int]
    unit: str | None
    tie: int | None
    replicas: Replicas
    dtype: torch.dtype
    device: torch.device
    trains: bool
    is_partial: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """The part of a parameter that this rank updates.

    `weight` is the optimizer's tensor: the parameter itself if the rank updates all of it, else the flattened elements
    of `span`. It is in full precision even if the parameter is not. `number` is the parameter's index in its bucket.
    """

    number: int
    span: Span
    weight: nn.Parameter

    @property
    def name(self) -> str:
        return self.span.slot.name


class Bucket:
    """The parameters of one key.

    `updates_whole`: every rank updates all of them alike. `updates_late`: updates may overlap with the next forward.
    `master`: the optimizer works on a copy in full precision.
    """

    def __init__(
        self,
        key: BucketKey,
        spec: BucketSpec,
        weights: Weights,
        gradients: AnyGradients | None,
        *,
        updates_whole: bool,
        updates_late: bool,
        master: bool,
    ) -> None:
        self.key, self.layout, self.weights, self.gradients = key, spec.layout, weights, gradients
        self._exchange, self._channel = spec.exchange, spec.channel + OTHER_TRANSFERS
        self.updates_whole = updates_whole
        #: Whether users of the weights wait for their update, rather than the end of the step.
        self.is_renewed_late = updates_late and updates_whole and not self.is_offloaded and gradients is not None
        self.sharing = Group() if updates_whole else key.replicas.shard
        self.master = self._follower.float() if master and gradients is not None else None
        self.pieces = [self._piece(span) for span in self.updated(self.sharing.rank)] if gradients is not None else []
        #: Whether its parameters always point into it: with two versions of the weights they do not.
        self._has_places = spec.parameter_of is None and not (isinstance(gradients, LocalGradients) and not master)
        #: The version counter of each parameter when it was last checked for writes from outside.
        self._versions = [version_of(each) for each in weights.parameters]
        #: The factor on a step's gradients, if it is applied when they are used.
        self.factor = 1.0
        #: Whether a step has a gradient for each piece, if gradients live on the host.
        self.gives = [False] * len(self.pieces)
        #: Whether it lives on the host and is updated in the backward: then its gradients are still on the device.
        self.hands_over = False
        #: The number of its pieces updated in this step, if it lives on the host.
        self.num_updated = 0

    @property
    def is_offloaded(self) -> bool:
        """Whether weights and gradients live on the host."""
        return isinstance(self.weights, OffloadedWeights)

    @property
    def host_weights(self) -> OffloadedWeights:
        """The weights of a bucket that lives on the host."""
        assert isinstance(self.weights, OffloadedWeights), "it lives on the host"
        return self.weights

    @property
    def host_gradients(self) -> HostGradients:
        """The part of its gradients on the host."""
        assert isinstance(self.gradients, OffloadedGradients), "its gradients live there too"
        return self.gradients.host

    def updated(self, rank: int) -> list[Span]:
        """Return the spans that a rank updates."""
        if self.updates_whole:
            return [Span(slot, 0, slot.shape.numel(), slot.start) for slot in self.layout.slots]
        return self.layout.spans(rank)

    @property
    def stays_for_update(self) -> bool:
        """Whether its weights are updated on the device after their backward, before they go back to the host."""
        weights, is_alone = self.weights, self.key.replicas.count == 1
        return self.hands_over and isinstance(weights, OffloadedWhole) and weights.master is None and is_alone

    @property
    def kept(self) -> Tensor:
        """The newest values of what this rank updates, in the optimizer's precision, where they live."""
        if isinstance(self.weights, OffloadedWeights):
            self.weights.settle()
            if self.weights.master is not None:
                return self.weights.master.host
        if self.is_renewed_late:
            self.weights.wait()
        return self._follower if self.master is None else self.master

    @property
    def _follower(self) -> Tensor:
        """The same in the parameters' own precision."""
        kept = self.weights.kept
        if self.updates_whole or self.weights.is_sharded:
            return kept
        return kept.view(self.sharing.size, -1)[self.sharing.rank]

    @property
    def trained(self) -> AnyGradients:
        """The gradients of a bucket that has some."""
        assert self.gradients is not None, "frozen parameters have no gradient"
        return self.gradients

    @property
    def result(self) -> Tensor:
        """The gradients of what this rank updates."""
        if self.updates_whole:
            assert isinstance(self.gradients, WholeGradients), "whole updates need whole gradients"
            return self.gradients.whole
        return self.trained.own

    @property
    def local(self) -> LocalGradients | None:
        """The gradients if each stays where autograd put it; otherwise None."""
        return self.gradients if isinstance(self.gradients, LocalGradients) else None

    def _piece(self, span: Span) -> Piece:
        number = self.layout.slots.index(span.slot)
        if self.updates_whole and self.master is None:
            return Piece(number=number, span=span, weight=self.weights.parameters[number])
        numbers = self.kept[span.at : span.at + span.length]
        return Piece(
            number=number,
            span=span,
            weight=nn.Parameter(numbers.view(span.slot.shape) if self.updates_whole else numbers),
        )

    def scale(self, factor: float) -> None:
        """Multiply the gradients."""
        self.factor = factor
        if not self.is_offloaded:
            multiply(self.result, factor)

    @property
    def given(self) -> Tensor:
        """The gradients on the device, as the optimizer received them."""
        result = self.result
        return multiply(result.to(self.key.device, copy=True), self.factor) if self.is_offloaded else result

    @torch.no_grad()
    def give(self, used: list[bool]) -> None:
        """Give each piece its gradient. A piece that no replica used gets none, as on one device."""
        if self.is_offloaded:
            self.gives, self.num_updated = [used[piece.number] for piece in self.pieces], 0
            return
        if self.local is not None:
            for piece in self.pieces:
                found = self.local.find(piece.number) if used[piece.number] else None
                piece.weight.grad = found if found is None or self.master is None else found.float()
            return
        result = self.result if self.master is None else self.result.float()
        for piece in self.pieces:
            gradient = result[piece.span.at : piece.span.at + piece.span.length].view(piece.weight.shape)
            piece.weight.grad = gradient if used[piece.number] else None

    @torch.no_grad()
    def take_back(self) -> None:
        """Bring updated pieces back to the weights of this rank and, if it has only a shard, of the others."""
        if isinstance(self.weights, OffloadedWeights):
            self.weights.is_renewed([])
        elif self.master is not None:
            self._follower.copy_(self.master)
            for piece in self.pieces:
                piece.weight.grad = None
        if not self.updates_whole:
            self.weights.expire()

    def gather(self, own: Tensor) -> Tensor:
        """Return all elements of the bucket, gathered from the replicas' pieces."""
        if self.updates_whole:
            return own
        whole = own.new_empty(self.layout.length)
        self._exchange.gather(whole, own.clone(), self.sharing, self._channel).wait()
        return whole

    @property
    def is_touched(self) -> bool:
        """Whether the module's parameters were written to in a way that the optimizer would not see."""
        if self.weights.is_sharded or self.is_offloaded or not self._has_places:
            return False
        if self.master is not None and self._versions != [version_of(each) for each in self.weights.parameters]:
            return True
        return any(self.weights.is_moved(number) for number in range(len(self._versions)))

    @torch.no_grad()
    def take_over(self) -> None:
        """Take over writes to the module's parameters from outside, and make them point into the bucket again."""
        if self.weights.is_sharded or self.is_offloaded or not self._has_places:
            return
        self.weights.show()
        moved = self.weights.bring_back()
        if any(moved) and self.master is None and not self.updates_whole:
            for piece in self.pieces:
                piece.weight.data = self.kept[piece.span.at : piece.span.at + piece.span.length]
        for number, (slot, is_moved) in enumerate(zip(self.layout.slots, moved, strict=True)):
            version = version_of(self.weights.parameters[number])
            if self.master is not None and (is_moved or version != self._versions[number]):
                self.load(slot, self.weights.parameters[number].data)
            self._versions[number] = version

    @torch.no_grad()
    def load(self, slot: Slot, whole: Tensor) -> None:
        """Load a parameter's values from the whole; `take_back` sends them to the other ranks."""
        flat = whole.detach().reshape(-1).to(self.kept.device)
        for span in self.updated(self.sharing.rank):
            if span.slot == slot:
                self.kept[span.at : span.at + span.length] = flat[span.start : span.stop]
