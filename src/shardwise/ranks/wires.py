"""All connections of a process with the others of its plan, made once: groups, a watch, a clock.

An engine uses its wires without knowing whether there are other processes. In a single process, a sum is its input, a
gather returns the one input, and no process has to be notified of an error.

    wires = make_wires(plan)                              in every process of the plan, alike
    first = parallelize(module, plan, ..., wires=wires)   several engines may use the same, one after the other
    second = parallelize(other, plan, ..., wires=wires)
    wires.close()                                         an engine closes wires that it has made itself
"""

import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.ranks.backend_exchange import make_exchange
from shardwise.ranks.clocks import SharedClock
from shardwise.ranks.collectives import Group
from shardwise.ranks.exchange import Exchange
from shardwise.ranks.faults import LIMIT_SECONDS, Watch
from shardwise.ranks.gpus import describe_mixed, gpu_of
from shardwise.ranks.links import Link, connect, is_on_nccl, make_groups, make_links
from shardwise.ranks.mesh import Mesh, Replicas, lone_mesh, make_mesh, make_replicas
from shardwise.ranks.telling import find_watch, gather_objects, others_of, telling
from shardwise.ranks.transport import ProcessTransport
from shardwise.torch_private import find_gpu_backend

#: How many times longer a rank is waited for that comes to its first step.
_PATIENCE_AT_FIRST = 10.0


class Wires:
    """The connections of an engine with other processes; all call its methods alike. The base class is for none."""

    mesh: Mesh
    #: The ranks of the pipeline that this process runs: its own, or all.
    ranks: tuple[int, ...]
    #: The rank of this process in the world.
    rank: int
    #: The watch that reports where this process is, if there are others.
    watch: Watch | None
    #: The ranks that hold the same dense weights, and those that hold the same experts.
    dense: Replicas
    experts: Replicas

    def is_on_nccl(self, device: torch.device) -> bool:
        """Whether this device's tensors move over NCCL."""
        return is_on_nccl(device)

    def make_exchange(self, device: torch.device) -> Exchange:
        """Return the exchange between replicas that compute on such a device."""
        return make_exchange(device, self.watch, on_nccl=self.is_on_nccl(device))

    def connect(self, ties: Iterable[Group], device: torch.device) -> None:
        """Connect all groups, and those of ties, before a step uses them: ranks reach them at different times."""

    def stand(self, place: object) -> None:
        """Report where this process stands, for example before it waits for its device."""

    def told_to_all(self, *, refusals: bool = True) -> AbstractContextManager[None]:
        """Return a context that reports errors to the others before they propagate; with `refusals`, also refusals."""
        return telling(self.watch, refusals=refusals)

    def doing(self, what: str) -> AbstractContextManager[None]:  # noqa: ARG002 - there are no others
        """Return a context for what all ranks do together, by the name of the method that they all call."""
        return nullcontext()

    def in_step(self, *, is_first: bool = False) -> AbstractContextManager[None]:  # noqa: ARG002 - nobody is late
        """Return a context for what all ranks do in a step: a gather that waits for a rank then names it, as every
        other wait does. Elsewhere a rank may come late: it may have a module to try, or a checkpoint to read. Before
        its first step it may have its loader to start, and is waited for longer."""
        return nullcontext()

    def check_before(self) -> None:
        """Raise if this rank has failed before: its connections are closed."""
        if self.watch is not None:
            self.watch.check_before()

    def start_sum(self, numbers: Tensor) -> Any:  # noqa: ARG002 - they are the sum
        """Start a sum of a CPU tensor over all processes, in place; None if the tensor is the sum already."""
        return None

    def sum(self, numbers: Tensor, what: str) -> None:
        """Sum a CPU tensor over all processes, in place."""

    def broadcast(self, numbers: Tensor, source: int, what: str) -> None:
        """Broadcast a CPU tensor from one process, in place."""

    def gather(self, given: Any, group: str | None = None) -> list[Any]:  # noqa: ARG002 - every group is this process
        """Gather an object from each process; with a name, from each process of this one's group of the mesh."""
        return [given]

    def clock_correction(self) -> float:
        """Return the seconds to add to this process's clock to get the shared clock."""
        return 0.0

    def belong_to(self, owner: object) -> None:
        """Keep these wires for the engine that has made them: if it is gone when all ranks make others, they close."""

    def abandon(self) -> None:
        """Leave these wires, if an engine has made them, to be closed when all ranks make others: an error has ended
        what used them here, and other ranks may be at work."""

    def close(self) -> None:
        """Close the connections between the processes."""


def _apart(doing: Mapping[int, str]) -> ShardwiseError:
    """Return the error of ranks that wait for each other in different methods."""
    told = ", ".join(f"rank {rank} calls {each or 'parallelize'}" for rank, each in sorted(doing.items()))
    one = next(each for each in doing.values() if each != "train_step")
    return ShardwiseError(
        f"{told}: ranks compute each of these together, so all of them call it",
        remedy=f"engine.{one or 'train_step'}(...) on every rank, outside of `if rank == 0:`, which is for what is"
        " printed or saved",
    )


class OneProcess(Wires):
    """The wires of a single process, which runs every rank of a pipeline, or the only rank."""

    def __init__(self, plan: Plan) -> None:
        self.mesh = lone_mesh(plan)
        self.ranks, self.rank = tuple(range(plan.pp)), 0
        self.watch = None
        self.dense = self.experts = Replicas(shard=Group())


class ManyProcesses(Wires):
    """One rank of a plan in each process of the default group. All of them make their wires at the same time."""

    def __init__(self, plan: Plan, watch: Watch) -> None:
        self.watch: Watch = watch
        #: Within a step, how many times the limit is waited for a rank.
        self._patience: float | None = None
        #: The method of the engine that runs.
        self._doing = ""
        # Creating a group cannot be interrupted if a rank does not come: so make sure that all are there first.
        self.mesh = make_mesh(plan, watch)
        _close_abandoned()
        self.rank = watch.rank
        self.ranks = (self.mesh.coordinates["pp"],)
        # Sums and gathers over all ranks have a group of their own: aborting one must not break another's.
        self._everybody: Any = dist.new_group(backend="gloo")
        self.watch.guard(self._everybody)
        self._clock: SharedClock | None = SharedClock(self._everybody, self.watch)
        self.dense = make_replicas(self.mesh.ranks("gradients"), watch, shard_size=plan.zero_group)
        self.experts = make_replicas(self.mesh.ranks("expert_gradients"), watch) if plan.ep > 1 else self.dense
        # From now on: a module is tried over these groups before it is trained.
        self._guard([*self.mesh.groups.values(), *self._of_replicas()])
        self._groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
        self._links: dict[frozenset[Link], dict[Link, dist.ProcessGroup]] = {}
        self._ties: list[Group] = []

    def make_transport(self, links: Iterable[Link], device: torch.device) -> ProcessTransport:
        """Return the transport over these links of the pipeline."""
        if self._groups is None:
            self.gather(None)
            self._groups = make_groups(self.mesh.pipelines)
        made = None
        if self.is_on_nccl(device):
            wanted = frozenset(links)
            if wanted not in self._links:
                if device.type == "cuda":
                    self.watch.follow(device)
                self.gather(None)  # A barrier: all are here, so from now on only NCCL takes time.
                self._links[wanted] = make_links(wanted, self.mesh.pipelines, device=device, watch=self.watch)
            made = self._links[wanted]
        return ProcessTransport(self._groups, device=device, links=made, watch=self.watch)

    def connect(self, ties: Iterable[Group], device: torch.device) -> None:
        mine = list(ties)
        self._ties += mine
        groups = [*self.mesh.groups.values(), *self._of_replicas(), *mine]
        self._guard(mine)
        if not self.is_on_nccl(device):
            for each in groups:
                if each.handle is not None:
                    each.waiting = partial(self._waiting, others_of(each.handle))
            return
        is_gpu = device.type == "cuda"
        if is_gpu:
            self.watch.follow(device)
            for each in groups:
                each.before_read = self.watch.mark
        # A barrier too: all are here, so from now on only NCCL takes time.
        found = self.gather(gpu_of(device) if is_gpu else None)
        connect(groups, device, self.watch)
        told = describe_mixed(found) if is_gpu and self.rank == 0 else None
        if told is not None:
            warnings.warn(told, stacklevel=2)

    def _guard(self, groups: Iterable[Group]) -> None:
        for each in groups:
            if each.handle is not None and each.size > 1:
                self.watch.guard(each.handle)

    def _of_replicas(self) -> list[Group]:
        return [each for pair in (self.dense, self.experts) for each in (pair.shard, pair.copies)]

    def stand(self, place: object) -> None:
        self.watch.at(place)

    def named_groups(self) -> list[tuple[str, dist.ProcessGroup]]:
        """Return all groups of this process by their purpose. A group with several names has the first of them."""
        named: list[tuple[str, dist.ProcessGroup | None]] = []
        for name, pair in (("replicas", self.dense), ("replicas of experts", self.experts)):
            named += [(name, pair.shard.handle), (f"copies of {name}", pair.copies.handle)]
        named += [(name, group.handle) for name, group in self.mesh.groups.items()]
        named += [(f"tie {number}", group.handle) for number, group in enumerate(self._ties)]
        for made in self._links.values():
            named += [(f"link {source}>{target}", each) for (source, target), each in made.items()]
        named += [("everybody", self._everybody)]
        named += zip(("headers up", "headers down"), self._groups or (), strict=False)
        return [(name, handle) for name, handle in named if handle is not None]

    def start_sum(self, numbers: Tensor) -> Any:
        return dist.all_reduce(numbers, group=self._everybody, async_op=True)

    def sum(self, numbers: Tensor, what: str) -> None:
        self.watch.wait(self.start_sum(numbers), what)

    def broadcast(self, numbers: Tensor, source: int, what: str) -> None:
        work = dist.broadcast(numbers, source, group=self._everybody, async_op=True)
        assert work is not None, "this process is of the group"
        self.watch.wait(work, what)

    def gather(self, given: Any, group: str | None = None) -> list[Any]:
        among = self._everybody if group is None else self.mesh.group(group).handle
        if among is None:
            return [given]
        what = "the gathering of what ranks hold"
        told = gather_objects((self._doing, given), among, self.watch, what, patience=self._patience)
        if len({each for each, _ in told}) > 1:
            ranks = dist.get_process_group_ranks(among)
            raise _apart({rank: each for rank, (each, _) in zip(ranks, told, strict=True)})
        return [each for _, each in told]

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        before, self._doing = self._doing, self._doing or what
        try:
            yield
        finally:
            self._doing = before

    def _waiting(self, others: Sequence[int]) -> AbstractContextManager[None]:
        """Return the context of the host's waits for these ranks: within a step, the watch knows of them."""
        return nullcontext() if self._patience is None else self.watch.asking(*others, patience=self._patience)

    @contextmanager
    def in_step(self, *, is_first: bool = False) -> Iterator[None]:
        before, self._patience = self._patience, _PATIENCE_AT_FIRST if is_first else 1.0
        try:
            yield
        finally:
            self._patience = before

    def clock_correction(self) -> float:
        assert self._clock is not None, "the wires are closed"
        return self._clock.correction()

    def belong_to(self, owner: object) -> None:
        _OPEN[self] = weakref.ref(owner)

    def abandon(self) -> None:
        if self in _OPEN:
            _OPEN[self] = _nobody

    def close(self) -> None:
        """Stop the watch, and destroy the groups: each has two threads and a connection for each other rank."""
        _OPEN.pop(self, None)
        self.watch.close()
        groups = [*self.mesh.groups.values(), *self._of_replicas(), *self._ties]
        handles: list[object] = [each.handle for each in groups]
        handles += [each for made in self._links.values() for each in made.values()]
        handles += [self._everybody, *(self._groups or ()), *self.watch.guarded]
        self._everybody, self._clock, self._groups = None, None, None
        self._links.clear()
        self._ties.clear()
        self.watch.guarded.clear()
        for handle in {id(each): each for each in handles if isinstance(each, dist.ProcessGroup)}.values():
            # Destroying an aborted group would wait for ranks that are gone. It ends with this process.
            if not self.watch.has_stopped or find_gpu_backend(handle) is None:
                with suppress(ValueError):  # The script has ended torch.distributed, and with it all groups.
                    dist.destroy_process_group(handle)
        # A group's threads end with the last reference to it, and sharded layers keep theirs.
        for group in groups:
            group.handle = None


def _nobody() -> None:
    """Stand in for the reference to an engine that needs its wires no more."""


#: The wires of this process that engines have made and not closed, and these engines. There is none if it was refused.
_OPEN: dict[ManyProcesses, Callable[[], object | None]] = {}


def _close_abandoned() -> None:
    """Close wires whose engines are gone. All ranks have come to make others, so none of them uses these."""
    if _OPEN:
        gc.collect()  # An engine is in cycles.
    for wires in [each for each, owner in _OPEN.items() if owner() is None]:
        wires.close()


def make_wires(
    plan: Plan, watch: Watch | None = None, *, limit_seconds: float = LIMIT_SECONDS, for_engine: bool = False
) -> OneProcess | ManyProcesses:
    """Return the wires of this process: `ManyProcesses` if `torch.distributed` has several ranks, else `OneProcess`.

    They use `watch`, if one was started before them. Those for an engine close, at the latest, when it is gone and all
    ranks make others.
    """
    watch = watch or find_watch(limit_seconds=limit_seconds)
    if watch is None:
        return OneProcess(plan)
    wires = ManyProcesses(plan, watch)
    if for_engine:
        _OPEN[wires] = _nobody
    return wires
