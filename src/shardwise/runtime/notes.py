"""What the ranks of a pipeline noted, told to each other."""

from typing import Any

import torch
import torch.distributed as dist

from shardwise.runtime.faults import Watch
from shardwise.runtime.recording import Note, Recording
from shardwise.schedule.schedule import Schedule


def gather_notes(
    recording: Recording, schedule: Schedule, rank: int, *, group: dist.ProcessGroup, correction: float, watch: Watch
) -> None:
    """Everybody tells everybody, by one clock. A rank runs no more than its list, and what was left of the last."""
    mine = torch.full((2 * max(map(len, schedule.orders)) + 1, 3), -1.0, dtype=torch.float64)
    for row, note in enumerate(recording.notes_of(rank)):
        mine[row] = torch.tensor([note.position, note.start + correction, note.end + correction])
    told = [torch.empty_like(mine) for _ in schedule.orders]
    work: Any = dist.all_gather(told, mine, group=group, async_op=True)
    watch.wait(work, "the gathering of the trace")
    recording.clear()
    for other, rows in enumerate(told):
        recording.add(other, (Note(int(row[0]), row[1], row[2]) for row in rows.tolist() if row[0] >= 0))
