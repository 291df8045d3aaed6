"""The operations of one rank, in order: a value that a checker reads without torch.

    MAKE     a group of ranks is created; all ranks of the world create all groups
    ISSUE    an operation is enqueued on its communicator's stream, after the work enqueued on `stream` so far
    WAIT     work enqueued on `stream` from now on comes after an operation, or after a copy
    KNOWN    the host has waited for an operation, or a copy
    SEEN     the host has asked whether one is complete, and it was: at another time it may not be. So this orders only
             that memory is freed
    COPY     a copy, or a computation, in a stream of its own beside the compute stream: it comes after `after`
    READ     work on `stream` reads memory that an operation or a copy uses; WRITE and FREE likewise

Of each memory the first touch after an operation is kept, and the last one before a copy: other work on the same stream
is ordered before or after these.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

#: The stream of compute.
COMPUTE = "compute"
#: What the host itself does with its memory. All that it enqueues afterwards comes after that, on any stream.
HOST = "the host"


class Kind(StrEnum):
    """The kinds of events, as in the table above."""

    MAKE = "make"
    ISSUE = "issue"
    WAIT = "wait"
    KNOWN = "known"
    SEEN = "seen"
    COPY = "copy"
    READ = "read"
    WRITE = "write"
    FREE = "free"


TOUCHES = frozenset({Kind.READ, Kind.WRITE, Kind.FREE})
#: What ends an operation, as the host sees it.
ENDS = frozenset({Kind.WAIT, Kind.KNOWN, Kind.SEEN})


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """A communicator: its ranks of the world, its number in the order of creation on this rank, and our name for it.

    One over gloo is for host tensors: only the host waits for its operations.
    """

    number: int
    members: tuple[int, ...]
    backend: str = "nccl"
    name: str = ""

    def __str__(self) -> str:
        named = f"{self.name}, " if self.name else ""
        return f"communicator {self.number} ({named}ranks {' '.join(map(str, self.members))})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A range of bytes in an allocation, numbered by this rank. `writes`: they are written, else read."""

    memory: int
    start: int
    stop: int
    writes: bool = False

    def overlaps(self, other: "Span") -> bool:
        return self.memory == other.memory and self.start < other.stop and other.start < self.stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A send or a receive of `count` elements. `peer` is a rank of the world."""

    is_send: bool
    peer: int
    count: int
    dtype: str
    tag: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A collective, or sends and receives that begin together (`transfers`).

    `count` and `dtype` are of this rank's input. `sent` and `received` are the rows of an all-to-all by member. `root`
    is the rank in the group of a broadcast, or of a reduction to one rank. `carries` identifies the data, the same on
    all ranks, if the code that issues it says so. `on_host`: over gloo, on host tensors.
    """

    kind: str
    communicator: int
    count: int = 0
    dtype: str = ""
    reduction: str = ""
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    root: int | None = None
    carries: str = ""
    transfers: tuple[Transfer, ...] = ()
    spans: tuple[Span, ...] = ()
    on_host: bool = False

    def __str__(self) -> str:
        if self.transfers:
            parts = [
                f"{'send to' if each.is_send else 'receive from'} rank {each.peer} of {each.count} {each.dtype}"
                for each in self.transfers
            ]
            return " with ".join(parts)
        reduced = f" ({self.reduction})" if self.reduction else ""
        root = "" if self.root is None else f", root {self.root}"
        carries = f", {self.carries}" if self.carries else ""
        return f"{self.kind}{reduced} of {self.count} {self.dtype}".rstrip() + root + carries


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a rank. `number` is that of an operation or a copy, in order of issue.

    `step` is the number of the step, None before the first, or the name of work outside of steps. `at` is the
    instruction of the schedule, and `line` the line of our source, if known.
    """

    kind: Kind
    number: int = -1
    stream: str = COMPUTE
    operation: Operation | None = None
    communicator: Communicator | None = None
    spans: tuple[Span, ...] = ()
    after: tuple[int, ...] = ()
    step: int | str | None = None
    at: str = ""
    line: str = ""

    @property
    def where(self) -> str:
        """Step, instruction and line, as part of a sentence."""
        when = f"in step {self.step}" if isinstance(self.step, int) else f"in {self.step}"
        if self.step is None:
            when = "before the first step"
        at = f" at {self.at}" if self.at else ""
        return f"{when}{at}{f' ({self.line})' if self.line else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """All events of one rank. `failure` is the reason why it did not finish."""

    rank: int
    communicators: tuple[Communicator, ...]
    events: Sequence[Event]
    failure: str | None = None

    def communicator(self, number: int) -> Communicator:
        """Return the communicator with this number."""
        return next(each for each in self.communicators if each.number == number)

    @property
    def issued(self) -> list[Event]:
        """The operations, in order of issue."""
        return [each for each in self.events if each.kind is Kind.ISSUE]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An error, or a possible one, on these ranks: a sentence, and what to look at."""

    kind: str
    ranks: tuple[int, ...]
    sentence: str
    look: str

    def __str__(self) -> str:
        return f"{self.sentence}\n  look at: {self.look}"
