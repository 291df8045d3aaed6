"""The optimizer step: every piece of a parameter is updated by the optimizer that was made for the whole."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.ranks.collectives import Group
from shardwise.states.buckets.bucket import Bucket
from shardwise.states.buckets.flat_layout import Slot
from shardwise.states.buckets.make import ParameterOwners
from shardwise.states.coupled_steps import check_coupled, check_elementwise, is_known
from shardwise.states.make_optimizers import MadeOptimizer, Weight, check_kept_tensors, check_step_hooks
from shardwise.states.optimizers.owners import OffloadedOwners, Owned, Owners
from shardwise.states.optimizers.steps_in_turn import check_in_turn
from shardwise.states.parameter_group import state_bytes_of
from shardwise.states.tiers.host_states import HostStates
from shardwise.torch_private import step_divided


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Updated:
    """A weight of an optimizer of this rank: the elements of a parameter from `start` on, flattened.

    `is_joined`: it is whole although tensor parallel ranks hold pieces of the parameter.
    """

    name: str
    start: int
    weight: nn.Parameter
    optimizer: Optimizer
    is_joined: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes on this rank. `optimizer` includes its state, and the full-precision weights that it works on.

    For trained 16-bit parameters with Adam, the total is 16 bytes per parameter under zero=0 (2 + 2 + 12), 4 + 12/N
    under 1, 2 + 14/N under 2 and 16/N under 3, on N ranks. In full precision only it is 4 + 4 + 8: 16, then 8 + 8/N,
    4 + 12/N and 16/N.
    """

    parameters: int
    gradients: int
    optimizer: int


class _Update:
    """The update of a bucket, beside the computation. It is a `Ticket`: its users compute after it."""

    def __init__(self, states: HostStates, bucket: Bucket) -> None:
        self._states, self._bucket = states, bucket

    def wait(self) -> None:
        self._states.follow(piece.weight for piece in self._bucket.pieces)
        self._bucket.take_back()


class Updates:
    """The optimizers of this rank: the same on every rank, with the rank's parts of their parameters.

    `are_cut`: replicas hold pieces of parameters; tensor parallel ranks do in any case. With `sort` weights are in the
    order of the buckets, which is about the order in which a backward finishes them.
    """

    def __init__(
        self,
        made: Sequence[MadeOptimizer],
        buckets: Sequence[Bucket],
        owners: ParameterOwners,
        *,
        are_cut: bool,
        sort: bool = False,
    ) -> None:
        self._buckets = list(buckets)
        self.optimizers: list[Optimizer] = []
        self._owners: list[Owners] = []
        self._joining, self._apart = owners.joining or owners.tensor, frozenset(owners.apart)
        #: The weights of optimizers, and for each optimizer a function that returns its bytes per element.
        self.updated: list[Updated] = []
        self.number_bytes: dict[Optimizer, Callable[[], float]] = {}
        #: The names of the parameters that each was made with, on any rank.
        self.names: dict[Optimizer, Collection[str]] = {}
        #: Optimizer state on the host, if there is any.
        self.states: HostStates | None = None
        #: The context of steps on this device: one of kernels that optimizers call in place of torch's.
        self.stepping: Callable[[], AbstractContextManager[None]] = nullcontext
        #: Whether their steps are on some parameters at a time.
        self.is_in_turn = False
        #: What step hooks would see, if it is not every parameter, whole.
        self.pieces: str | None = None
        #: Optimizers of which pieces are updated, as they are said to be elementwise; and whether these are in a row.
        self._of_pieces: list[Optimizer] = []
        self._are_flat = are_cut
        #: Weights of custom optimizers that are not the module's own parameters, and these.
        self._own: list[tuple[nn.Parameter, nn.Parameter]] = []
        for each in made:
            self._add(each, are_cut=are_cut or owners.tensor is not None, sort=sort)
        self.show_attributes()

    def _add(self, made: MadeOptimizer, *, are_cut: bool, sort: bool) -> None:
        names = made.names
        # Experts are cut too if ranks of ep have some each.
        cut = names if are_cut else names & self._apart
        whole = cut if cut and made.sees_whole() else set()
        weights = [
            Weight(piece.name, piece.span.start, piece.weight, is_joined=False)
            for bucket in self._buckets
            for piece in bucket.pieces
            if piece.name in names and piece.name not in whole
        ]
        weights += self._owned(whole)
        if cut and not whole:
            self._of_pieces.append(made.optimizer)
        if not is_known(made.optimizer):
            self._own += self._parameters_of(names)
        made.give(weights, None if self._joining is None else self._joining.local, sort=sort)
        self.optimizers.append(made.optimizer)
        self.names[made.optimizer] = names
        self.number_bytes[made.optimizer] = partial(state_bytes_of, made.optimizer)
        self.updated += [
            Updated(
                name=each.name, start=each.start, weight=each.weight, optimizer=made.optimizer, is_joined=each.is_joined
            )
            for each in weights
        ]

    def _parameters_of(self, names: Collection[str]) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Return weights of parameters, and these, where they are not the same."""
        pieces = [
            (piece.weight, bucket.weights.parameters[piece.number])
            for bucket in self._buckets
            for piece in bucket.pieces
            if piece.name in names
        ]
        owned = [
            (weight, entry.bucket.weights.parameters[entry.number])
            for owners in self._owners
            for entry, weight in owners.entries
            if entry.slot.name in names
        ]
        return [(weight, own) for weight, own in [*pieces, *owned] if weight is not own]

    def show_attributes(self) -> None:
        """Give weights the attributes of their parameters: a step may read `parameter.lr_scale`."""
        for weight, own in self._own:
            vars(weight).update(vars(own))

    def _owned(self, names: Collection[str]) -> list[Weight]:
        """Return the weights among some parameters that this rank updates whole, as their owner."""
        by_group: dict[tuple[Group, bool], list[Owned]] = {}
        for bucket in self._buckets:
            for number, slot in enumerate(bucket.layout.slots):
                if slot.name in names:
                    key = (bucket.sharing, bucket.is_offloaded)
                    by_group.setdefault(key, []).append(Owned(bucket, slot, number))
        found: list[Weight] = []
        for (group, is_offloaded), entries in by_group.items():
            costs = [self._cost_of(entry.slot) for entry in entries]
            owners = (OffloadedOwners if is_offloaded else Owners)(entries, group, costs, self._joining)
            self._owners.append(owners)
            found += [Weight(name, start, weight, is_joined=True) for weight, name, start in owners.named]
        return found

    def _cost_of(self, slot: Slot) -> int:
        """Return the work of a whole parameter: the same on all ranks that have a piece of it."""
        shape = slot.shape if self._joining is None else self._joining.of(slot.name).shape
        return int(torch.Size(shape).numel())

    def step(
        self,
        used: Mapping[Bucket, list[bool]],
        done: Collection[Bucket] = (),
        divided: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Update all weights of this rank from its gradients. Optimizers already have those of `done`.

        `divided`: the divisor of gradients for fused optimizers, and whether to skip the step.
        """
        for bucket in self._buckets:
            if bucket not in done:
                bucket.give(used[bucket])
        for owners in self._owners:
            owners.give(lambda bucket: used[bucket])
        if self.states is None:
            for optimizer in self.optimizers:
                with self.stepping():
                    if divided is None:
                        optimizer.step()
                    else:
                        step_divided(optimizer, *divided)
        else:
            self.states.step()
            self._follow(self.states)
        for owners in self._owners:
            owners.take_back()
        for bucket in self._buckets:
            if self.states is not None and bucket.is_renewed_late:
                bucket.weights.renew(_Update(self.states, bucket))
            else:
                bucket.take_back()

    def check_hooks(self) -> None:
        """Refuse hooks of steps where they would see pieces: those that a factory has registered, and later ones."""
        if self.pieces is not None:
            check_step_hooks(self.optimizers, self.pieces)

    def check_kept(self) -> None:
        """Refuse what optimizers have made of whole parameters before they got pieces, and those that take all of them
        together."""
        if self.pieces is not None:
            check_kept_tensors(self.optimizers, self.pieces)
        self.check_steps()

    @property
    def custom(self) -> list[Optimizer]:
        """Return the optimizers whose steps are tried, as they do not have all parameters at a time, whole."""
        is_tried = self.pieces is not None or self.is_in_turn
        return [each for each in self.optimizers if not is_known(each)] if is_tried else []

    def check_steps(self) -> None:
        """Refuse custom optimizers whose steps depend on parameters, or on parts of them, that they do not have."""
        if self.pieces is not None:
            check_coupled(self.optimizers, self.pieces)
            check_elementwise(self._of_pieces, self.pieces, are_flat=self._are_flat)
        if self.is_in_turn:
            check_in_turn(self.optimizers)

    def _follow(self, states: HostStates) -> None:
        """Wait for updates of weights that other ranks need, or wait for, before these are sent."""
        states.follow(weight for owners in self._owners for weight in owners.weights)
        now = [bucket for bucket in self._buckets if not bucket.is_renewed_late]
        states.follow(piece.weight for bucket in now for piece in bucket.pieces)

    def refresh(self) -> None:
        """Take over changes of weights from outside."""
        for owners in self._owners:
            owners.refresh()
        for bucket in self._buckets:
            bucket.take_back()

    @property
    def offloaded(self) -> list[OffloadedOwners]:
        """Return what assembles whole parameters from pieces on the host."""
        return [each for each in self._owners if isinstance(each, OffloadedOwners)]

    def held(self, buckets: Sequence[Bucket]) -> Held:
        """Return the bytes that this rank holds now, with all of its buckets."""
        states = [
            each for optimizer in self.optimizers for state in optimizer.state.values() for each in state.values()
        ]
        masters = [bucket.master for bucket in buckets if bucket.master is not None]
        # In addition to pieces; whole parameters of pieces on the host are on the host too.
        owned = [each for one in self._owners if not isinstance(one, OffloadedOwners) for each in one.weights]
        return Held(
            parameters=sum(bucket.weights.num_bytes for bucket in buckets),
            gradients=sum(bucket.gradients.num_bytes for bucket in buckets if bucket.gradients is not None),
            # A count of steps is a single number, but it is counted too.
            optimizer=sum(each.nbytes for each in [*states, *owned] if isinstance(each, Tensor))
            # Master weights may live on the host.
            + sum(each.untyped_storage().nbytes() for each in masters),
        )
