"""Insert gathers and releases of sharded parameters (ZeRO-3): early enough to overlap, and never more than fit.

    rank 0, two chunks (stages 0 and 2), at most 2 gathered
    0GATHER0 2GATHER0 0F0 0F1 2F0 2F1 2B0 2B1 2RELEASE0 0B0 0B1 0RELEASE0

A stage is gathered as soon as there is room, so that its bytes move while another stage computes. When room is needed,
the stage with the farthest next use is released (Belady): no other choice gathers less often.
"""

from bisect import bisect_left
from math import inf

from shardwise.errors import ShardwiseError
from shardwise.schedule.instruction import COMPUTE, Instruction, Kind
from shardwise.schedule.schedule import Schedule


def insert_gathers(schedule: Schedule, *, max_gathered: int) -> Schedule:
    """Return the schedule with a GATHER before and a RELEASE behind each stretch in which a stage is used.

    A rank never has more than `max_gathered` stages gathered: 2 or more let a gather run beside a computation.
    """
    least = 2 if any(each.beside is not None for order in schedule.orders for each in order) else 1
    if max_gathered < least:
        raise ShardwiseError(
            f"{max_gathered} gathered stages at a time: the schedule computes on {least} at once",
            remedy=f"max_gathered={least}",
        )
    return schedule.with_orders([_with_gathers(order, max_gathered) for order in schedule.orders])


def _with_gathers(order: tuple[Instruction, ...], max_gathered: int) -> list[Instruction]:
    uses: dict[int, list[int]] = {}  # For each stage, the positions where it is computed on.
    for position, instruction in enumerate(order):
        if instruction.kind in COMPUTE and instruction.kind is not Kind.STEP:
            for part in instruction.parts:
                uses.setdefault(part.stage, []).append(position)
    before: dict[int, list[Instruction]] = {}
    num_gathers = dict.fromkeys(uses, 0)
    gathered: set[int] = set()
    room_since = 0
    for position, stage in sorted((position, stage) for stage, positions in uses.items() for position in positions):
        if stage in gathered:
            continue
        if len(gathered) == max_gathered:
            evicted = max(gathered, key=lambda each: _next_use(uses[each], position))
            gathered.remove(evicted)
            room_since = _last_before(uses[evicted], position) + 1
            before.setdefault(room_since, []).append(Instruction(Kind.RELEASE, evicted, num_gathers[evicted] - 1))
        gathered.add(stage)
        before.setdefault(room_since, []).append(Instruction(Kind.GATHER, stage, num_gathers[stage]))
        num_gathers[stage] += 1
    for stage in sorted(gathered):
        before.setdefault(uses[stage][-1] + 1, []).append(Instruction(Kind.RELEASE, stage, num_gathers[stage] - 1))
    out: list[Instruction] = []
    for position, instruction in enumerate(order):
        out += [*before.get(position, ()), instruction]
    return out + before.get(len(order), [])


def _next_use(positions: list[int], now: int) -> tuple[float, int]:
    """Return the sort key of eviction: the position of the next use; ties go to the stage that was idle for longer."""
    coming = bisect_left(positions, now)
    next_position = positions[coming] if coming < len(positions) else inf
    return next_position, -_last_before(positions, now)


def _last_before(positions: list[int], now: int) -> int:
    return positions[bisect_left(positions, now) - 1]
