"""The schedules by name: what each needs, and how to make it.

A generator's module is imported when its schedule is asked for.
"""

from dataclasses import dataclass
from importlib import import_module

from shardwise.errors import ShardwiseError, unknown
from shardwise.schedule.schedule import Schedule
from shardwise.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One named schedule.

    `least_microbatches` is the minimum per rank (0: any number). A `mirrored` schedule holds two copies of the model in
    opposite directions, and needs even numbers of ranks and microbatches. `chunks` is the number of chunks on a rank:
    fixed, or, if `any_chunks_from` is given, the default of a number from there on (even, if `even_chunks`).
    `splits_backward`: input gradients first, weight gradients later.
    """

    name: str
    idea: str
    chunks: int = 1
    any_chunks_from: int | None = None
    even_chunks: bool = False
    least_microbatches: int = 0
    mirrored: bool = False
    splits_backward: bool = False

    @property
    def num_weight_copies(self) -> int:
        return 2 if self.mirrored else 1

    @property
    def module(self) -> str:
        return _MODULES.get(self.name, self.name.replace("-", "_"))


_MODULES = {"1f1b": "one_f_one_b", "eager-1f1b": "eager_one_f_one_b"}

CATALOGUE = {
    entry.name: entry
    for entry in (
        Entry(name="gpipe", idea="all forwards, then all backwards"),
        Entry(name="1f1b", idea="one forward, one backward: memory bounded by depth"),
        Entry(name="eager-1f1b", idea="1F1B with twice the head start: a hop is paid once"),
        Entry(name="interleaved", idea="1F1B over several chunks a rank", chunks=2, any_chunks_from=1),
        Entry(name="looped-bfs", idea="all microbatches through a chunk, then the next", chunks=2, any_chunks_from=1),
        Entry(name="pipedream-2bw", idea="no flush: two weight versions, one step stale", least_microbatches=1),
        Entry(name="zb-h1", idea="weight gradients fill the bubble, memory of 1F1B", splits_backward=True),
        Entry(name="zb-h2", idea="no bubble in the span, twice the memory", splits_backward=True),
        Entry(
            name="zb-v", idea="no bubble in the span, memory of 1F1B, when F = I = W", chunks=2, splits_backward=True
        ),
        Entry(name="v-half", idea="half the memory of 1F1B, half its bubble", chunks=2, splits_backward=True),
        Entry(name="v-min", idea="a third of the memory of 1F1B", chunks=2, splits_backward=True),
        Entry(
            name="dualpipe-v",
            idea="forwards overlap backwards, folded",
            chunks=2,
            least_microbatches=2,
            splits_backward=True,
        ),
        Entry(
            name="dualpipe",
            idea="forwards overlap backwards, the model held twice",
            chunks=2,
            least_microbatches=2,
            mirrored=True,
            splits_backward=True,
        ),
        Entry(name="chimera", idea="two pipes in opposite directions, the model held twice", chunks=2, mirrored=True),
        Entry(name="hanayo", idea="waves over the ranks", chunks=4, any_chunks_from=2, even_chunks=True),
    )
}


def make_schedule(name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None = None) -> Schedule:
    """Return a named schedule, computation only. `lower` adds transfers and steps, `simulate` simulates it."""
    if name not in CATALOGUE:
        raise unknown("schedule", name, [*CATALOGUE, "auto"])
    entry = CATALOGUE[name]
    check(entry, num_ranks, num_microbatches, num_chunks)
    module = import_module(f"shardwise.schedule.generators.{entry.module}")
    make = getattr(module, entry.module)
    if entry.any_chunks_from is not None:
        schedule: Schedule = make(num_ranks, num_microbatches, num_chunks or entry.chunks)
    else:
        schedule = make(num_ranks, num_microbatches)
    return schedule


def check_counts(num_ranks: int, num_microbatches: int) -> None:
    """Refuse numbers that no schedule can have."""
    if num_ranks < 1:
        raise ShardwiseError(f"{num_ranks} stages: a pipeline has at least 1", remedy="--stages 4")
    if num_microbatches < 1:
        raise ShardwiseError(
            f"{num_microbatches} microbatches: a step has at least 1", remedy=f"--microbatches {2 * num_ranks}"
        )


def check(entry: Entry, num_ranks: int, num_microbatches: int, num_chunks: int | None) -> None:
    """Refuse numbers that a schedule does not support, with a remedy that it does."""
    check_counts(num_ranks, num_microbatches)
    if entry.mirrored and num_ranks % 2:
        raise ShardwiseError(
            f"{entry.name} needs an even number of stages, not {num_ranks}: microbatches meet in the middle",
            remedy=f"--stages {num_ranks + 1}",
        )
    least = entry.least_microbatches * num_ranks
    if num_microbatches < least:
        stages = counted(num_ranks, "stage")
        raise ShardwiseError(
            f"{entry.name} over {stages} needs at least {least} microbatches, not {num_microbatches}",
            remedy=f"--microbatches {least}",
        )
    if entry.mirrored and num_microbatches % 2:
        raise ShardwiseError(
            f"{entry.name} needs an even number of microbatches, not {num_microbatches}: half enter at each end",
            remedy=f"--microbatches {num_microbatches + 1}",
        )
    if num_chunks is not None:
        _check_chunks(entry, num_chunks)


def _check_chunks(entry: Entry, num_chunks: int) -> None:
    if entry.any_chunks_from is None:
        if num_chunks != entry.chunks:
            raise ShardwiseError(
                f"{entry.name} has {counted(entry.chunks, 'chunk')} on a rank, not {num_chunks}",
                remedy=f"--chunks {entry.chunks}, or a schedule that takes any number, like interleaved",
            )
    elif num_chunks < entry.any_chunks_from or (entry.even_chunks and num_chunks % 2):
        wanted = "an even number of chunks" if entry.even_chunks else "chunks"
        raise ShardwiseError(
            f"{entry.name} takes {wanted} on a rank, {entry.any_chunks_from} or more, not {num_chunks}",
            remedy=f"--chunks {entry.chunks}",
        )
