"""The ranks of a plan as a grid, and every group of them that communicates: named once, made once.

    pp=2,dp=2,tp=2              rank = ((pp * DP + dp) * CP + cp) * TP + tp, if the plan says no other order

          tp 0 1                tensor parallel ranks communicate most and are adjacent;
    dp 0     0 1   pp 0         pipeline ranks communicate least and are furthest apart
    dp 1     2 3
          ------
    dp 0     4 5   pp 1
    dp 1     6 7

Expert parallelism has no axis of its own in the grid: its groups are subsets of the ranks that hold the same dense
weights (data and context parallel, and tensor parallel if requested), the nearest together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwise.errors import ShardwiseError, unknown
from shardwise.planner.placement.grid import ORDER, along, grid_of, sizes_of
from shardwise.planner.plan import Plan
from shardwise.ranks.collectives import Group
from shardwise.ranks.faults import Watch
from shardwise.ranks.rank_error import RankError
from shardwise.ranks.telling import watched

#: For each group, the axes of the grid along which its ranks differ.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "gradients": ("dp", "cp"),
    "model": ("pp", "tp"),
    "world": ORDER,
}
#: Groups for experts: the ranks that they are sharded over, and those that hold the same ones.
EXPERT_GROUPS = ("ep", "expert_gradients")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """A rank's place in the grid, and its groups.

    `tp`, `cp`, `dp` and `pp` are the axes; `gradients` are the ranks whose gradients of dense weights are summed,
    `model` those that together hold the model once; `ep` and `expert_gradients` are the same two for experts.
    """

    plan: Plan
    rank: int
    sizes: Mapping[str, int]
    coordinates: Mapping[str, int]
    pipelines: tuple[tuple[int, ...], ...]
    groups: Mapping[str, Group] = field(repr=False)

    def group(self, name: str) -> Group:
        """Return the group of this rank with this name."""
        if name not in self.groups:
            raise unknown("group", name, self.groups)
        return self.groups[name]

    def ranks(self, name: str) -> tuple[int, ...]:
        """Return the world's ranks of this rank's group."""
        handle = self.group(name).handle
        return (self.rank,) if handle is None else tuple(dist.get_process_group_ranks(handle))


def make_mesh(plan: Plan, watch: Watch | None = None, *, experts_over_tp: bool = False) -> Mesh:
    """Make the mesh of this process. Every rank of the world calls this, with the same plan."""
    if not dist.is_available() or not dist.is_initialized():
        plan.check_world(1)
        return lone_mesh(plan)
    rank = dist.get_rank()
    with watched(watch) as watching:
        agree_on(plan, watching)
    plan.check_world(dist.get_world_size())
    sizes = sizes_of(plan)
    grid = _grid(plan)
    parts = {name: _along(grid, axes) for name, axes in GROUPS.items()}
    parts |= dict(zip(EXPERT_GROUPS, _expert_parts(grid, plan, experts_over_tp=experts_over_tp), strict=True))
    place = (grid == rank).nonzero()[0].tolist()
    return Mesh(
        plan=plan,
        rank=rank,
        sizes=sizes,
        coordinates=dict(zip(ORDER, place, strict=True)),
        pipelines=tuple(sorted(parts["pp"])),
        groups=_make_groups(parts, rank),
    )


def lone_mesh(plan: Plan) -> Mesh:
    """Return the mesh of one process that runs every rank of a pipeline: every group is this process alone."""
    pipeline = tuple(range(plan.pp))
    return Mesh(
        plan=plan,
        rank=0,
        sizes=sizes_of(plan),
        coordinates=dict.fromkeys(ORDER, 0),
        pipelines=(pipeline,),
        groups={name: Group() for name in (*GROUPS, *EXPERT_GROUPS)},
    )


def _grid(plan: Plan) -> torch.Tensor:
    return torch.from_numpy(grid_of(plan).copy())


class Replica(NamedTuple):
    """One of the data parallel replicas of a plan: its index, and their number."""

    replica: int
    num_replicas: int


def replicas_of(plan: Plan) -> list[Replica]:
    """Return the replica of each rank of a plan, in order."""
    grid = _grid(plan)
    parts = grid.unbind(ORDER.index("dp"))
    places = {rank: place for place, part in enumerate(parts) for rank in part.flatten().tolist()}
    return [Replica(places[rank], len(parts)) for rank in range(plan.num_ranks)]


def places_together(plan: Plan) -> list[int]:
    """Return for each rank of a plan, in order, a number that it shares with the ranks that compute one forward
    together: those of its replica with the same stages."""
    grid = _grid(plan).movedim((ORDER.index("dp"), ORDER.index("pp")), (0, 1)).flatten(2).flatten(0, 1)
    places = {rank: place for place, ranks in enumerate(grid.tolist()) for rank in ranks}
    return [places[rank] for rank in range(plan.num_ranks)]


def stages_of(plan: Plan) -> list[int]:
    """Return for each rank of a plan, in order, a number that it shares with the ranks that hold the same stages, and
    the same parts of their layers."""
    grid = _grid(plan).movedim((ORDER.index("pp"), ORDER.index("tp")), (0, 1)).flatten(2).flatten(0, 1)
    places = {rank: place for place, ranks in enumerate(grid.tolist()) for rank in ranks}
    return [places[rank] for rank in range(plan.num_ranks)]


def agree_on(plan: Plan, watch: Watch) -> None:
    """Detect ranks with another plan before anything else is done: one of them reports it, and all stop."""
    plans = watch.exchange(str(plan), "the comparison of plans")
    different = next((other for other, text in enumerate(plans) if text != plans[0]), None)
    if different is None:
        return
    problem = f"rank 0 has the plan {plans[0]}, but rank {different} has {plans[different]}"
    if watch.rank == different:
        raise ShardwiseError(problem, remedy=f"the plan {plans[0]} on every rank")
    raise RankError(problem, remedy=f"the plan {plans[0]} on every rank", rank=different)


def _along(grid: torch.Tensor, axes: Sequence[str]) -> list[tuple[int, ...]]:
    return [tuple(row) for row in along(grid.numpy(), axes).tolist()]


def _expert_parts(
    grid: torch.Tensor, plan: Plan, *, experts_over_tp: bool
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the ranks that experts are sharded over, and the ranks that hold the same ones."""
    among = ("dp", "cp", "tp") if experts_over_tp else ("dp", "cp")
    alike = _along(grid, among)
    if len(alike[0]) % plan.ep:
        sizes = " x ".join(f"{axis}={grid.shape[ORDER.index(axis)]}" for axis in among)
        raise ShardwiseError(
            f"ep={plan.ep} does not divide the {len(alike[0])} ranks that it is carved from ({sizes})",
            remedy=f"ep={max(size for size in range(1, plan.ep) if len(alike[0]) % size == 0)}",
        )
    sharing, same = [], []
    for ranks in alike:
        rows = torch.tensor(ranks).reshape(-1, plan.ep)
        sharing += [tuple(row) for row in rows.tolist()]
        same += [tuple(row) for row in rows.t().tolist()]
    return sharing, same


def _make_groups(parts: Mapping[str, list[tuple[int, ...]]], rank: int) -> dict[str, Group]:
    """Make every group, in an order that all ranks share. Names for the same ranks have the same group."""
    made: dict[tuple[tuple[int, ...], ...], Group] = {}
    groups: dict[str, Group] = {}
    for name, partition in parts.items():
        key = tuple(sorted(tuple(sorted(ranks)) for ranks in partition))
        if key not in made:
            handles = [(ranks, dist.new_group(list(ranks))) for ranks in key]
            made[key] = Group(next(handle for ranks, handle in handles if rank in ranks))
        groups[name] = made[key]
    return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """The ranks that hold the same parameters, as two groups of this rank: `shard` divides them, `copies` repeat them.

    all alike          shard over all 8                       least memory
    hybrid             shard over the 4 of a node,            gathers stay inside a node; between nodes only a rank's
                       repeat on both nodes                   own shard of the gradients is summed
    """

    shard: Group
    copies: Group = field(default_factory=Group)

    @property
    def count(self) -> int:
        """The number of ranks that hold the same parameters."""
        return self.shard.size * self.copies.size


def make_replicas(ranks: Sequence[int], watch: Watch | None = None, *, shard_size: int | None = None) -> Replicas:
    """Make the groups of this rank and the `ranks` of the world that hold the same. Every rank of the world calls this.

    With `shard_size`, parameters are sharded over so many neighbours and repeated on the others. The groups carry
    nothing else: sums start when gradients are ready, which may be at different times on different ranks.
    """
    size = len(ranks) if shard_size is None else shard_size
    if size < 1 or len(ranks) % size:
        fitting = [each for each in range(1, len(ranks) + 1) if len(ranks) % each == 0]
        nearest = min(fitting, key=lambda each: abs(each - size))
        raise ShardwiseError(
            f"{len(ranks)} replicas cannot be sharded in groups of {size}", remedy=f"groups of {nearest}"
        )
    with watched(watch) as watching:
        every: list[tuple[int, ...]] = watching.exchange(tuple(ranks), "the making of groups")
    rows = [each[start : start + size] for each in sorted(set(every)) for start in range(0, len(each), size)]
    columns = [each[place::size] for each in sorted(set(every)) for place in range(size)]
    return Replicas(shard=_join(rows), copies=_join(columns))


def _join(parts: Sequence[Sequence[int]]) -> Group:
    """Make the groups; return the one that this rank is in. A group of one needs no connection."""
    mine = Group()
    for ranks in parts:
        handle = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        if handle is not None and dist.get_rank() in ranks:
            mine = Group(handle)
    return mine
