"""Make the buckets of a rank from its stages.

Parameters share a bucket only if everything that happens to a bucket as a whole is the same for them: the stages that
use them, the ranks that hold them, their dtype. They are in the reverse of the module's order, which is about the order
in which a backward finishes them. A bucket is only as large as an efficient transfer needs, so that the first can be
sent while the others fill.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.ranks.exchange import BufferPool, Exchange
from shardwise.ranks.mesh import Replicas
from shardwise.schedule.schedule import Schedule
from shardwise.stages.stage import Stage
from shardwise.states.buckets.bucket import CHANNELS_OF_A_BUCKET, AnyGradients, Bucket, BucketKey
from shardwise.states.buckets.flat_layout import BucketSpec, FlatLayout
from shardwise.states.buckets.gradients import LocalGradients, ScatteredGradients, WholeGradients
from shardwise.states.buckets.offloaded_gradients import OffloadedScatteredGradients, OffloadedWholeGradients
from shardwise.states.buckets.offloaded_weights import OffloadedShards, OffloadedWhole
from shardwise.states.buckets.tensor_interface import Joining, TensorInterface
from shardwise.states.buckets.ties import Tie
from shardwise.states.buckets.weights import Weights
from shardwise.states.tiers.choose_offloaded import choose_fraction

#: Between CPU processes a byte costs more in small buckets; but the sum of the last bucket of a backward cannot overlap
#: with anything.
BUCKET_BYTES = 16 * 2**20
_HALVES = (torch.bfloat16, torch.float16)

#: The units that use a parameter, by its id, if nothing else uses it.
Users = Mapping[int, Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroConfig:
    """How much of the model state is sharded over its replicas.

    `zero` is the ZeRO stage. With `masters` optimizers work on fp32 master weights of 16-bit parameters. `layerwise`:
    with zero=3, weights are gathered unit by unit, not stage by stage. `offloaded` is the share of the units' weights
    that lives on the host, with its gradients. `updates_late`: optimizer state is on the host, and updates of weights
    that every rank updates whole may overlap with the next forward. `local`: there is one replica, and gradients stay
    where autograd puts them.
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
class HeldStages:
    """The stages of one process, by their numbers in the schedule.

    `ranks` are the ranks of the pipeline that it runs: one, or all of them. `module` is needed if weights are gathered
    unit by unit. `parameter_of(name, step)` returns where a step's gradients are, if there are several versions of the
    weights.
    """

    stages: Mapping[int, Stage]
    schedule: Schedule
    ranks: Sequence[int]
    module: nn.Module | None = None
    parameter_of: Callable[[str, int], nn.Parameter] | None = None

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: each for stage in self.stages.values() for name, each in stage.parameters.items()}

    @property
    def device(self) -> torch.device:
        """The device of the parameters; without any, sums of this process are empty."""
        devices = (each.device for each in self.parameters.values())
        return next((each for each in devices if each.type != "cpu"), torch.device("cpu"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterOwners:
    """Which other ranks hold each parameter, or other parts of it, by name.

    `replicas_of` returns the ranks that hold one too, `ties` are those shared by stages on other ranks, `tensor` is how
    they are sharded over tensor parallel ranks. `joining` assembles whole parameters if ranks of tp or ep have parts,
    and `apart` are the parameters of which ranks of ep have parts.
    """

    replicas_of: Callable[[str], Replicas]
    ties: Sequence[Tie] = ()
    tensor: TensorInterface | None = None
    joining: Joining | None = None
    apart: Collection[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Members:
    """A bucket to be made: its parameters by their original names."""

    key: BucketKey
    parameters: Mapping[str, nn.Parameter]

    @property
    def nbytes(self) -> int:
        """The bytes on every rank that has them whole."""
        return sum(each.nbytes for each in self.parameters.values())

    def can_offload(self, users: Users) -> bool:
        """Whether it can live on the host: no gradients are added to it later, and only units use it."""
        is_own = self.key.tie is None and not self.key.is_partial and len(self.key.stages) == 1
        return is_own and all(id(each) in users for each in self.parameters.values())


def make_buckets(
    held: HeldStages, owners: ParameterOwners, sharing: ZeroConfig, users: Users, exchange: Exchange
) -> list[Bucket]:
    """Move the parameters of this rank's stages into buckets. Frozen ones only if weights are not always here."""
    is_layered = sharing.zero == 3 and sharing.layerwise
    partial = owners.tensor.partial if owners.tensor is not None else frozenset()

    def key_of(name: str, parameter: nn.Parameter, stages: frozenset[int]) -> BucketKey:
        own = users.get(id(parameter), ())
        tie = next((at for at, each in enumerate(owners.ties) if each.group.size > 1 and name in each.names), None)
        # Tied ranks have the same buckets, although their units differ.
        in_units = is_layered and (tie is None or owners.ties[tie].is_copy)
        return BucketKey(
            stages=stages,
            unit=own[0] if in_units and len(own) == 1 else None,
            tie=tie,
            replicas=owners.replicas_of(name),
            dtype=parameter.dtype,
            device=parameter.device,
            trains=parameter.requires_grad,
            is_partial=name in partial,
        )

    wanted = {
        number: {
            name: each
            for name, each in stage.parameters.items()
            if each.requires_grad or sharing.zero == 3 or sharing.offloaded
        }
        for number, stage in held.stages.items()
    }
    pool = BufferPool()
    # If nothing is sent, each parameter keeps its own memory.
    most_bytes = 1 if sharing.local else sharing.bucket_bytes
    every = _share_out(wanted, key_of, None if is_layered else most_bytes)
    offloaded = _choose(every, users, sharing.offloaded) if sharing.offloaded else []
    made = []
    for number, members in enumerate(every):
        shapes = [(name, each.shape) for name, each in members.parameters.items()]
        spec = BucketSpec(
            layout=FlatLayout.of(shapes, members.key.dtype, members.key.replicas.shard.size),
            parameters=list(members.parameters.values()),
            replicas=members.key.replicas,
            exchange=exchange,
            channel=number * CHANNELS_OF_A_BUCKET,
            parameter_of=held.parameter_of,
        )
        made.append(_make(members.key, spec, sharing, pool, is_offloaded=members in offloaded))
    return made


def _share_out(
    parameters: Mapping[int, Mapping[str, nn.Parameter]],
    key_of: Callable[[str, nn.Parameter, frozenset[int]], BucketKey],
    most_bytes: int | None,
) -> list[_Members]:
    """Put the parameters of each stage into buckets; `most_bytes` None puts all of a key into one.

    The buckets of later stages come first, as their backwards do.
    """
    stages_of: dict[str, set[int]] = {}
    found: dict[str, nn.Parameter] = {}
    for stage in sorted(parameters, reverse=True):
        for name, parameter in reversed(list(parameters[stage].items())):
            stages_of.setdefault(name, set()).add(stage)
            found.setdefault(name, parameter)
    keys: dict[BucketKey, list[str]] = {}
    for name, parameter in found.items():
        keys.setdefault(key_of(name, parameter, frozenset(stages_of[name])), []).append(name)
    return [
        _Members(key=key, parameters={name: found[name] for name in names})
        for key, mine in keys.items()
        for names in _cut(mine, [found[name].nbytes for name in mine], most_bytes)
    ]


def _cut(names: Sequence[str], sizes: Sequence[int], most_bytes: int | None) -> list[list[str]]:
    """Return runs of names of about this many bytes, each with at least one."""
    runs: list[list[str]] = [[]]
    held = 0
    for name, size in zip(names, sizes, strict=True):
        if most_bytes is not None and runs[-1] and held + size > most_bytes:
            runs.append([])
            held = 0
        runs[-1].append(name)
        held += size
    return runs


def _choose(every: Sequence[_Members], users: Users, fraction: float) -> list[_Members]:
    """Return the buckets that live on the host. A bucket of several units goes with the first of them."""
    units: dict[str, list[_Members]] = {own[0]: [] for own in users.values()}
    for members in every:
        if members.can_offload(users):
            first = min(members.parameters.values(), key=lambda each: list(users).index(id(each)))
            units[users[id(first)][0]].append(members)
    return choose_fraction(units, fraction)


def _make(key: BucketKey, spec: BucketSpec, sharing: ZeroConfig, pool: BufferPool, *, is_offloaded: bool) -> Bucket:
    is_sharded = sharing.zero == 3
    kind = Weights if not is_offloaded else OffloadedShards if is_sharded else OffloadedWhole
    weights = kind(spec, is_sharded=is_sharded)
    gradients: AnyGradients | None = None
    if key.trains and sharing.local and not is_offloaded:
        gradients = LocalGradients(spec)
    elif key.trains and sharing.scatters:
        gradients = (OffloadedScatteredGradients if is_offloaded else ScatteredGradients)(spec, pool=pool)
    elif key.trains:
        gradients = (OffloadedWholeGradients if is_offloaded else WholeGradients)(spec, to_all=sharing.zero == 0)
    return Bucket(
        key, spec, weights, gradients, updates_whole=sharing.zero == 0, updates_late=sharing.updates_late,
        master=key.dtype in _HALVES and sharing.masters,
    )  # fmt: skip
