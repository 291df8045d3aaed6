"""The step: every piece of a parameter is updated by the optimizer of its share."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.optim import Optimizer

from shardwise.ranks.collectives import Group
from shardwise.states.buckets.bucket import Bucket
from shardwise.states.buckets.tensor_interface import Joining
from shardwise.states.optimizers.offloaded_owners import OffloadedOwners
from shardwise.states.optimizers.owners import Owned, Owners
from shardwise.states.parameter_group import Share, make_on_pieces, sort_out
from shardwise.states.tiers.host_memory import number_bytes_of
from shardwise.states.tiers.host_states import HostStates


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Updated:
    """A weight that an optimizer of this rank has: the numbers of a parameter from `start` on, flattened.

    `is_joined`: it is whole over tensor parallel ranks too, where these hold pieces of the parameter.
    """

    name: str
    start: int
    weight: nn.Parameter
    optimizer: Optimizer
    is_joined: bool


class _Update:
    """The update of a bucket, beside what is computed. It is a `Ticket`: whoever waits computes after it."""

    def __init__(self, states: HostStates, bucket: Bucket) -> None:
        self._states, self._bucket = states, bucket

    def wait(self) -> None:
        self._states.follow(piece.weight for piece in self._bucket.pieces)
        self._bucket.take_back()


class Updates:
    """The optimizers of this rank. A share that has nothing here has none.

    `are_cut`: whether ranks hold pieces of parameters; of those `apart` they do anyway. `cost_of(name)` is how much
    work a whole parameter is, the same on all ranks that have a piece of it.
    """

    def __init__(
        self,
        shares: Sequence[Share],
        buckets: Sequence[Bucket],
        *,
        are_cut: bool,
        cost_of: Callable[[str], int],
        joining: Joining | None = None,
        apart: Collection[str] = (),
    ) -> None:
        self._buckets = list(buckets)
        self.optimizers: list[Optimizer] = []
        self._owners: list[Owners] = []
        self._cost_of, self._joining, self._apart = cost_of, joining, frozenset(apart)
        #: What the optimizers have, and for each what tells the bytes that it keeps for a number.
        self.updated: list[Updated] = []
        self.number_bytes: dict[Optimizer, Callable[[], float]] = {}
        #: State that is on the host, if some is.
        self.states: HostStates | None = None
        parameters = {
            slot.name: parameter
            for bucket in self._buckets
            for slot, parameter in zip(bucket.layout.slots, bucket.weights.parameters, strict=True)
        }
        for share, names in zip(shares, sort_out(shares, parameters), strict=True):
            if names:
                self._add(share, set(names), are_cut=are_cut)

    def _add(self, share: Share, names: set[str], *, are_cut: bool) -> None:
        pieces = [piece for bucket in self._buckets for piece in bucket.pieces if piece.name in names]
        weights = [piece.weight for piece in pieces]
        # Experts are cut too where ranks of ep have some each.
        cut = names if are_cut else names & self._apart
        made = make_on_pieces(share, weights) if cut else share.make(weights)
        if made is not None:
            self._note(made, weights, [(piece.name, piece.span.start) for piece in pieces], is_joined=False)
            self.number_bytes[made] = partial(number_bytes_of, share.make, weights)
            return
        if cut != names:
            self._add(share, names - cut, are_cut=False)
        by_group: dict[tuple[Group, bool], list[Owned]] = {}
        for bucket in self._buckets:
            for number, slot in enumerate(bucket.layout.slots):
                if slot.name in cut:
                    key = (bucket.sharing, bucket.is_offloaded)
                    by_group.setdefault(key, []).append(Owned(bucket, slot, number))
        owned: list[nn.Parameter] = []
        called: list[tuple[str, int]] = []
        for (group, is_offloaded), entries in by_group.items():
            costs = [self._cost_of(entry.slot.name) for entry in entries]
            owners = (OffloadedOwners if is_offloaded else Owners)(entries, group, costs, self._joining)
            self._owners.append(owners)
            owned += owners.weights
            called += owners.names
        if owned:
            self._note(share.make(owned), owned, called, is_joined=True)
            self.number_bytes[self.optimizers[-1]] = partial(number_bytes_of, share.make, owned)

    def _note(
        self, made: Optimizer, weights: Sequence[nn.Parameter], called: Sequence[tuple[str, int]], *, is_joined: bool
    ) -> None:
        self.optimizers.append(made)
        self.updated += [
            Updated(name=name, start=start, weight=weight, optimizer=made, is_joined=is_joined)
            for weight, (name, start) in zip(weights, called, strict=True)
        ]

    def step(self, used: Mapping[Bucket, list[bool]], done: Collection[Bucket] = ()) -> None:
        """Update all weights of this rank from its gradients. Optimizers have been given those of `done` already."""
        for bucket in self._buckets:
            if bucket not in done:
                bucket.give(used[bucket])
        for owners in self._owners:
            owners.give(lambda bucket: used[bucket])
        if self.states is None:
            for optimizer in self.optimizers:
                optimizer.step()
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

    def _follow(self, states: HostStates) -> None:
        """Updates of what other ranks need, or wait for, have to be over before it goes to them."""
        states.follow(weight for owners in self._owners for weight in owners.weights)
        now = [bucket for bucket in self._buckets if not bucket.is_renewed_late]
        states.follow(piece.weight for bucket in now for piece in bucket.pieces)

    def refresh(self) -> None:
        """Weights were changed from outside: take them over."""
        for owners in self._owners:
            owners.refresh()
        for bucket in self._buckets:
            bucket.take_back()

    @property
    def offloaded(self) -> list[OffloadedOwners]:
        """What makes parameters whole of pieces that live on the host."""
        return [each for each in self._owners if isinstance(each, OffloadedOwners)]

    @property
    def owned(self) -> list[nn.Parameter]:
        """Whole weights that this rank has on the device for its optimizers, beside its pieces."""
        return [weight for each in self._owners if not isinstance(each, OffloadedOwners) for weight in each.weights]
