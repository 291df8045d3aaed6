"""What ranks run for the tests of the recorder: small things, noted."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from shardwise.engine.parallelize import parallelize
from shardwise.nccl.program import Program
from shardwise.nccl.rehearsal import RehearsedWires
from shardwise.nccl.taps import recording, touching
from shardwise.parity.problem import make_optimizer
from shardwise.planner.plan import Plan
from shardwise.ranks.collectives import Group, start_all_gather, start_all_reduce
from shardwise.ranks.faults import Watch
from tests.parity.models import make_problem


def gather_and_sum() -> Program:
    """A gather that is read after its wait, then a sum whose memory is written after its wait."""
    with recording() as recorder:
        group = Group(dist.new_group([0, 1]))
        dist.new_group([1], backend="gloo")
        assert group.handle is not None
        recorder.name([("pair", group.handle)])
        recorder.step = 0
        with touching(recorder):
            pending = start_all_gather(torch.ones(3), group)
            other = torch.zeros(4) + 1  # Nobody's matter.
            gathered = pending.finish()
            total = gathered.sum() + other.sum()
            summed = torch.full((2,), float(total))
            start_all_reduce(summed, group).finish()
            summed.zero_()
    return recorder.program()


def with_a_root() -> Program:
    """What a module of a user's own may call: rank 1 gets a number of each rank, and gives one to each."""
    with recording() as recorder:
        group, rank = dist.new_group([0, 1]), dist.get_rank()
        number, parts = torch.ones(3), [torch.zeros(3), torch.zeros(3)] if rank == 1 else None
        dist.gather(number, parts, dst=1, group=group)
        dist.scatter(number, parts, src=1, group=group)
        dist.broadcast(number, src=1, group=group)
    return recorder.program()


def attributes() -> list[tuple[str, str]]:
    """What stands where the recorder would: the same before and after."""
    return [(name, repr(getattr(dist.ProcessGroup, name))) for name in ("allreduce", "send", "recv")] + [
        ("new_group", repr(dist.new_group)),
        ("resize_", repr(torch.UntypedStorage.resize_)),
    ]


def is_left_as_it_was() -> bool:
    before = attributes()
    with recording():
        changed = attributes()
    return before == attributes() and all(one != other for one, other in zip(before, changed, strict=True))


def count_both_ways(text: str) -> list[tuple[dict[str, int], dict[str, int]]]:
    """By kind, the collectives of each group of the mesh: as the groups have counted them, and as they were noted."""
    plan = Plan.parse(text)
    problem = make_problem("tied", plan)()
    with recording() as recorder:
        wires = RehearsedWires(plan, Watch(dist.get_rank(), dist.get_world_size()))
        options: dict[str, Any] = {"optimizer": make_optimizer, "example": problem.batches[0], "wires": wires}
        engine = parallelize(problem.module, plan, loss=problem.loss, **options)
        groups = {id(each.handle): each for each in wires.mesh.groups.values() if each.handle is not None}
        numbers = {key: recorder.number_of(each.handle) for key, each in groups.items()}
        recorder.step = 0
        before = {key: each.traffic.copy() for key, each in groups.items()}
        engine.train_step(problem.batches[0])
        found = []
        for key, each in groups.items():
            counted = each.traffic.calls - before[key].calls
            noted = Counter(
                event.operation.kind
                for event in recorder.program().issued
                if event.operation is not None and event.step == 0 and event.operation.communicator == numbers[key]
            )
            found.append((dict(counted), dict(noted)))
        engine.close()
        wires.close()
    return found
