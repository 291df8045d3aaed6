"""Small programs written by hand, for tests of the checker: no torch is imported."""

from dataclasses import replace

from shardwise.nccl.program import COMPUTE, Communicator, Event, Kind, Operation, Program, Span, Transfer


class Rank:
    """A program that is written line by line."""

    def __init__(self, rank: int, *communicators: Communicator) -> None:
        self.rank, self.communicators, self.events = rank, communicators, list[Event]()
        self._count = 0

    def make(self, communicator: Communicator) -> "Rank":
        self.events.append(Event(kind=Kind.MAKE, communicator=communicator))
        self.communicators += (communicator,)
        return self

    def issue(self, operation: Operation, stream: str = COMPUTE) -> int:
        self._count += 1
        self.events.append(
            Event(kind=Kind.ISSUE, number=self._count, operation=operation, stream=stream, step=0, line="net.py:7")
        )
        return self._count

    def wait(self, number: int, stream: str = COMPUTE, kind: Kind = Kind.WAIT) -> "Rank":
        self.events.append(Event(kind=kind, number=number, stream=stream, step=0, at="0F1"))
        return self

    def touch(self, kind: Kind, number: int, memory: int, stop: int = 40, stream: str = COMPUTE) -> "Rank":
        span = Span(memory=memory, start=0, stop=stop)
        self.events.append(Event(kind=kind, number=number, spans=(span,), stream=stream, step=0, at="0F1"))
        return self

    def copy(self, stream: str, *spans: Span, after: tuple[int, ...] = ()) -> int:
        self._count += 1
        self.events.append(Event(kind=Kind.COPY, number=self._count, stream=stream, spans=spans, after=after, step=0))
        return self._count

    def program(self, failure: str | None = None) -> Program:
        return Program(rank=self.rank, communicators=self.communicators, events=tuple(self.events), failure=failure)


def pair(number: int = 1, name: str = "tp", backend: str = "nccl", members: tuple[int, ...] = (0, 1)) -> Communicator:
    return Communicator(number=number, members=members, name=name, backend=backend)


def all_reduce(communicator: int = 1, count: int = 10, memory: int = 1, **other: object) -> Operation:
    """A sum in place of numbers of 4 bytes."""
    made = Operation(
        kind="all_reduce", communicator=communicator, count=count, dtype="float32", reduction="sum",
        spans=(Span(memory=memory, start=0, stop=4 * count, writes=True),),
    )  # fmt: skip
    return replace(made, **other)  # type: ignore[arg-type]


def send(peer: int, communicator: int = 1, count: int = 10, memory: int = 1, **other: object) -> Operation:
    return _transfer(peer, communicator, count, memory, is_send=True, **other)


def receive(peer: int, communicator: int = 1, count: int = 10, memory: int = 1, **other: object) -> Operation:
    return _transfer(peer, communicator, count, memory, is_send=False, **other)


def _transfer(peer: int, communicator: int, count: int, memory: int, *, is_send: bool, **other: object) -> Operation:
    dtype = str(other.pop("dtype", "float32"))
    tag = int(str(other.pop("tag", 0)))
    made = Operation(
        kind="send" if is_send else "receive", communicator=communicator,
        transfers=(Transfer(is_send=is_send, peer=peer, count=count, dtype=dtype, tag=tag),),
        spans=(Span(memory=memory, start=0, stop=4 * count, writes=not is_send),),
    )  # fmt: skip
    return replace(made, **other)  # type: ignore[arg-type]
