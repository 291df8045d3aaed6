"""Race detection: memory that is used while an operation or a copy may still use it.

Every stream has a vector clock of the work that it is ordered after: its own order, its waits, and their predecessors.
Two uses of the same bytes, of which one writes, must be ordered. Work that the host has waited for is ordered before
all that it enqueues later, on any stream. Freed memory counts as written by the next work of the compute stream, the
order in which the allocator reuses it.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwise.nccl.program import COMPUTE, ENDS, HOST, TOUCHES, Event, Kind, Problem, Program, Span

Clock = dict[str, int]


class _Use(NamedTuple):
    stream: str
    time: int
    span: Span
    event: Event


class _Streams:
    """The vector clock of each stream, and the clock at the completion of each operation and copy."""

    def __init__(self) -> None:
        self._clocks: dict[str, Clock] = defaultdict(dict)
        self._known: Clock = {}
        #: What the host has seen to be over: only then has it freed memory.
        self._seen: Clock = {}
        self._over: dict[int, Clock] = {}

    def clock(self, stream: str) -> Clock:
        return self._clocks[stream]

    def tick(self, stream: str) -> int:
        clock = self._clocks[stream]
        # The host has waited for these before it enqueued anything more on any stream.
        _join(clock, self._known)
        clock[stream] = clock.get(stream, 0) + 1
        return clock[stream]

    def begin(self, stream: str, after: Sequence[Clock]) -> int:
        for each in after:
            _join(self._clocks[stream], each)
        return self.tick(stream)

    def end(self, number: int, stream: str) -> None:
        self._over[number] = dict(self._clocks[stream])

    def over(self, number: int) -> Clock:
        return self._over.get(number, {})

    def wait(self, stream: str, number: int) -> None:
        _join(self._clocks[stream], self.over(number))

    def know(self, number: int) -> None:
        _join(self._known, self.over(number))

    def see(self, number: int) -> None:
        _join(self._seen, self.over(number))

    def before_free(self, stream: str) -> Clock:
        """Return the clock of memory that is freed now."""
        return {each: max(self._clocks[stream].get(each, 0), self._seen.get(each, 0)) for each in self._names(stream)}

    def _names(self, stream: str) -> set[str]:
        return {*self._clocks[stream], *self._seen}

    def know_host(self) -> None:
        """The host has done what it did before it enqueues anything more."""
        _join(self._known, self._clocks[HOST])


def _join(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if clock.get(stream, 0) < time:
            clock[stream] = time


def races(program: Program) -> Iterator[Problem]:
    """Yield uses of memory without an order, operations without a wait, and operations issued too early."""
    streams, used = _Streams(), defaultdict[int, list[_Use]](list)
    issued: dict[int, Event] = {}
    waited: set[int] = set()
    for event in program.events:
        if event.kind is Kind.ISSUE and event.operation is not None:
            issued[event.number] = event
            yield from _early(program, streams, event)
            stream = f"gloo {event.number}" if event.operation.on_host else f"nccl {event.operation.communicator}"
            streams.tick(event.stream)
            time = streams.begin(stream, [streams.clock(event.stream)])
            streams.end(event.number, stream)
            yield from _uses(program, streams, used, stream, time, event.operation.spans, event)
        elif event.kind is Kind.COPY:
            time = streams.begin(event.stream, [streams.over(each) for each in event.after])
            streams.end(event.number, event.stream)
            yield from _uses(program, streams, used, event.stream, time, event.spans, event)
        elif event.kind in ENDS:
            waited.add(event.number)
            on_host = event.number in issued and _is_on_host(issued[event.number])
            if event.kind is Kind.SEEN and not on_host:
                streams.see(event.number)
            elif event.kind is Kind.KNOWN or on_host:
                streams.know(event.number)
            else:
                streams.wait(event.stream, event.number)
        elif event.kind in TOUCHES:
            time = streams.tick(event.stream)
            if event.stream == HOST:
                streams.know_host()
            yield from _uses(program, streams, used, event.stream, time, event.spans, event)
    if program.failure is None:
        yield from _never_waited(program, issued, waited)


def _is_on_host(event: Event) -> bool:
    return event.operation is not None and event.operation.on_host


def _early(program: Program, streams: _Streams, event: Event) -> Iterator[Problem]:
    """Yield a problem if an operation is issued on a stream that has not waited for the compute of its data."""
    streams.begin(event.stream, [])
    if event.stream == COMPUTE or _is_on_host(event):
        return
    computed = streams.clock(COMPUTE).get(COMPUTE, 0)
    if streams.clock(event.stream).get(COMPUTE, 0) < computed:
        yield Problem(
            kind="stream",
            ranks=(program.rank,),
            sentence=f"rank {program.rank} issues {_named(program, event)} on stream {event.stream} {event.where}, and"
            " that stream has not waited for what was computed by then",
            look=f"{event.line or event.at}: a wait of stream {event.stream} for stream {COMPUTE} before it",
        )


def _uses(
    program: Program,
    streams: _Streams,
    used: dict[int, list[_Use]],
    stream: str,
    time: int,
    spans: Sequence[Span],
    event: Event,
) -> Iterator[Problem]:
    clock = streams.before_free(stream) if event.kind is Kind.FREE else streams.clock(stream)
    for span in spans:
        writes = span.writes or event.kind in (Kind.WRITE, Kind.FREE)
        for other in used[span.memory]:
            if not (writes or other.span.writes) or not span.overlaps(other.span) or other.event is event:
                continue
            if other.stream != stream and clock.get(other.stream, 0) < other.time:
                yield _race(program, other, event, span)
                break
    for span in spans:
        writes = span.writes or event.kind in (Kind.WRITE, Kind.FREE)
        used[span.memory].append(
            _Use(stream, time, Span(memory=span.memory, start=span.start, stop=span.stop, writes=writes), event)
        )


_DOES = {Kind.READ: "reads", Kind.WRITE: "writes to", Kind.FREE: "frees"}


def _race(program: Program, before: _Use, event: Event, span: Span) -> Problem:
    earlier = before.event
    num_bytes = min(span.stop, before.span.stop) - max(span.start, before.span.start)
    if event.kind in TOUCHES:
        does = f"{_DOES[event.kind]} {num_bytes} bytes"
    else:
        does = f"{'writes' if span.writes else 'reads'} {num_bytes} bytes by {_named(program, event)}"
    kind = {Kind.READ: "use", Kind.FREE: "freed"}.get(event.kind, "reuse")
    when = f"{earlier.where}" if earlier.where != event.where else "there"
    return Problem(
        kind=kind,
        ranks=(program.rank,),
        sentence=f"rank {program.rank} {does} {event.where} while {_named(program, earlier)}, issued {when}, may still"
        f" {'write' if before.span.writes else 'read'} them: stream {event.stream} has not waited for it",
        look=f"{event.line or event.at or 'the step'}: a wait for {_named(program, earlier)} before it",
    )


def _named(program: Program, event: Event) -> str:
    if event.operation is not None:
        return f"{event.operation} on {program.communicator(event.operation.communicator)}"
    if event.kind is Kind.COPY:
        return f"the copy {event.number} on stream {event.stream}"
    return f"the {event.kind} by the host" if event.stream == HOST else f"the {event.kind} on stream {event.stream}"


def _never_waited(program: Program, issued: dict[int, Event], waited: set[int]) -> Iterator[Problem]:
    for number, event in issued.items():
        if number not in waited:
            yield Problem(
                kind="unwaited",
                ranks=(program.rank,),
                sentence=f"rank {program.rank} issues {_named(program, event)} {event.where}, and nobody ever waits for"
                " it",
                look=f"{event.line or event.at or 'the step'}: what becomes of its work",
            )
