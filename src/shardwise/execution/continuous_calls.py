"""Which instructions of a schedule over several steps can run once a batch is there.

Where the pipe is never emptied between steps, the list of a rank goes on from one batch into the next. With each batch
a rank runs its list as far as the first forward of the next one; what is then left of the batch is run with the next,
or when the pipe is to be emptied. Here with 2 ranks and 2 microbatches a step:

                call 0         call 1            call 2               to empty it after call 1
    rank 0      F0 F1 B0       F2 B1 F3 B2       F4 B3 F5 B4          B3
    rank 1      F0 B0 F1 B1    F2 B2 F3 B3       F4 B4 F5 B5
"""

from typing import NamedTuple

from shardwise.schedule.instruction import Instruction, Kind
from shardwise.schedule.schedule import Schedule


class Calls(NamedTuple):
    """Of one rank: positions in its list that run with each step's batch, and those that empty the pipe after it."""

    feeds: tuple[tuple[int, ...], ...]
    flushes: tuple[tuple[int, ...], ...]


def calls_of(schedule: Schedule, rank: int) -> Calls:
    """Divide a rank's list. A schedule of one step is one call, and nothing is left to empty."""
    feeds: list[list[int]] = [[] for _ in range(schedule.num_steps)]
    flushes: list[list[int]] = [[] for _ in range(schedule.num_steps)]
    begun = 0
    for position, instruction in enumerate(schedule.orders[rank]):
        own = step_of(schedule, instruction)
        if instruction.kind is Kind.F:
            begun = max(begun, own)
        # A receive that is posted before its step has begun waits for that: nothing is sent to it if there is none.
        call = max(begun, own)
        feeds[call].append(position)
        for step in range(own, call):
            flushes[step].append(position)
    return Calls(tuple(map(tuple, feeds)), tuple(map(tuple, flushes)))


def step_of(schedule: Schedule, instruction: Instruction) -> int:
    """The step that an instruction belongs to."""
    if instruction.kind in (Kind.STEP, Kind.REDUCE):
        return instruction.microbatch
    if instruction.kind in (Kind.GATHER, Kind.RELEASE):
        return 0
    return schedule.step_of(instruction.microbatch)
