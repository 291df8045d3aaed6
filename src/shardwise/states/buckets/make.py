"""From the stages of a rank to its buckets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.ranks.exchange import BufferPool, Exchange
from shardwise.ranks.mesh import Replicas
from shardwise.states.buckets.bucket import Bucket
from shardwise.states.buckets.bucketing import BUCKET_BYTES, Home, Members, share_out
from shardwise.states.buckets.flat_layout import FlatLayout
from shardwise.states.buckets.gradients import ScatteredGradients, WholeGradients
from shardwise.states.buckets.local_gradients import LocalGradients
from shardwise.states.buckets.offloaded_gradients import OffloadedScatteredGradients, OffloadedWholeGradients
from shardwise.states.buckets.offloaded_weights import OffloadedShards, OffloadedWhole
from shardwise.states.buckets.tie_groups import Tie
from shardwise.states.buckets.weights import Weights
from shardwise.states.tiers.choose_offloaded import choose_fraction

#: Of each bucket: gathers, sums over shards, sums over copies, and other transfers of the bucket.
CHANNELS_OF_A_BUCKET = 4
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroConfig:
    """How much of the state of a model is shared out over its replicas.

    `zero` is the ZeRO stage. With `masters` optimizers work on master weights in full precision of parameters that are
    of 16 bits. `layerwise`: with zero=3, weights are gathered unit by unit and not stage by stage. `offloaded` is the
    part of what units have that lives on the host, with its gradients. `updates_late`: optimizer state is on the host,
    and updates of weights that every rank updates whole may run on under the next forward. `local`: there is one
    replica, and gradients stay where autograd puts them.
    """

    zero: int = 0
    masters: bool = False
    bucket_bytes: int = BUCKET_BYTES
    layerwise: bool = False
    offloaded: float = 0.0
    updates_late: bool = False
    local: bool = False

    @property
    def scatters(self) -> bool:
        """Whether gradients are summed to shards in every backward."""
        return self.zero >= 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterOwners:
    """What is known of parameters by their names: who else holds them."""

    replicas_of: Callable[[str], Replicas]
    ties: Sequence[Tie]
    partial: frozenset[str]
    #: The units that use a parameter and all of whose uses it has, by its id.
    users: Mapping[int, Sequence[str]]

    def find_tie(self, name: str) -> int | None:
        """The tie that other ranks have a part in."""
        numbers = (number for number, tie in enumerate(self.ties) if tie.group.size > 1 and name in tie.names)
        return next(numbers, None)

    def find_unit(self, parameter: nn.Parameter) -> str | None:
        """The one unit that uses it, if there is one."""
        users = self.users.get(id(parameter), ())
        return users[0] if len(users) == 1 else None

    def can_offload(self, members: Members) -> bool:
        """Whether a bucket can live on the host: what nobody adds gradients to later, and only units use."""
        home = members.home
        is_own = home.tie is None and not home.is_partial and len(home.stages) == 1
        return is_own and all(id(each) in self.users for each in members.parameters.values())


def make_buckets(
    parameters: Mapping[int, Mapping[str, nn.Parameter]],
    sharing: ZeroConfig,
    owners: ParameterOwners,
    exchange: Exchange,
    parameter_of: Callable[[str, int], nn.Parameter] | None,
) -> list[Bucket]:
    """Move the parameters of this rank's stages into buckets. Frozen ones only where weights are not always here."""
    is_layered = sharing.zero == 3 and sharing.layerwise

    def home_of(name: str, parameter: nn.Parameter, stages: frozenset[int]) -> Home:
        tie = owners.find_tie(name)
        # Tied ranks have the same buckets, though their units differ.
        in_units = is_layered and (tie is None or owners.ties[tie].is_copy)
        return Home(
            stages=stages,
            unit=owners.find_unit(parameter) if in_units else None,
            tie=tie,
            replicas=owners.replicas_of(name),
            dtype=parameter.dtype,
            device=parameter.device,
            trains=parameter.requires_grad,
            is_partial=name in owners.partial,
        )

    wanted = {
        stage: {
            name: each for name, each in held.items() if each.requires_grad or sharing.zero == 3 or sharing.offloaded
        }
        for stage, held in parameters.items()
    }
    pool = BufferPool()
    # Where nothing is sent each parameter is by itself, in the memory that it has.
    most_bytes = 1 if sharing.local else sharing.bucket_bytes
    every = share_out(wanted, home_of, None if is_layered else most_bytes)
    offloaded = _choose(every, owners, sharing.offloaded) if sharing.offloaded else []
    return [
        _make(number, members, sharing, exchange, pool, parameter_of, is_offloaded=members in offloaded)
        for number, members in enumerate(every)
    ]


def _choose(every: Sequence[Members], owners: ParameterOwners, fraction: float) -> list[Members]:
    """The buckets that live on the host. One of several units goes with the first of them."""
    units: dict[str, list[Members]] = {users[0]: [] for users in owners.users.values()}
    for members in every:
        if owners.can_offload(members):
            first = min(members.parameters.values(), key=lambda each: list(owners.users).index(id(each)))
            units[owners.users[id(first)][0]].append(members)
    return choose_fraction(units, fraction)


def _make(
    number: int,
    members: Members,
    sharing: ZeroConfig,
    exchange: Exchange,
    pool: BufferPool,
    parameter_of: Callable[[str, int], nn.Parameter] | None,
    *,
    is_offloaded: bool,
) -> Bucket:
    home, parameters = members.home, list(members.parameters.values())
    shapes = [(name, each.shape) for name, each in members.parameters.items()]
    shard, channel = home.replicas.shard, number * CHANNELS_OF_A_BUCKET
    layout = FlatLayout.of(shapes, home.dtype, shard.size)
    is_sharded = sharing.zero == 3
    kind = Weights if not is_offloaded else OffloadedShards if is_sharded else OffloadedWhole
    weights = kind(layout, parameters, shard, exchange, channel, dtype=home.dtype, is_sharded=is_sharded)
    gradients: WholeGradients | ScatteredGradients | LocalGradients | None = None
    if home.trains and sharing.local and not is_offloaded:
        gradients = LocalGradients(
            layout, parameters, home.replicas, exchange, channel + 1, parameter_of=parameter_of
        )  # fmt: skip
    elif home.trains and sharing.scatters:
        scattered = OffloadedScatteredGradients if is_offloaded else ScatteredGradients
        gradients = scattered(layout, parameters, home.replicas, exchange, channel + 1, pool=pool)
    elif home.trains:
        whole = OffloadedWholeGradients if is_offloaded else WholeGradients
        gradients = whole(
            layout, parameters, home.replicas, exchange, channel + 1, to_all=sharing.zero == 0,
            parameter_of=parameter_of,
        )  # fmt: skip
    return Bucket(
        home, layout, weights, gradients, updates_whole=sharing.zero == 0, updates_late=sharing.updates_late,
        master=home.dtype in _HALVES and sharing.masters,
    )  # fmt: skip
