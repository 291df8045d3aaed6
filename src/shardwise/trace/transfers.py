"""What went from rank to rank: each send with its receive, and with the computation that read what came."""

from dataclasses import dataclass

from shardwise.trace.events import Event, Lane, Trace
from shardwise.trace.labels import stages_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A value on its way. `reader` is the first computation on it after it came, if there was one."""

    send: Event
    receive: Event
    reader: Event | None


def transfers(trace: Trace) -> tuple[Transfer, ...]:
    """Every transfer whose both ends are in the trace, in the order of the receives."""
    readers: dict[tuple[int, int, int], list[Event]] = {}
    for events in trace.compute:
        for event in events:
            for stage, microbatch in stages_of(event):
                readers.setdefault((event.rank, stage, microbatch), []).append(event)
    found = []
    for receive in trace.events:
        if receive.lane is not Lane.RECEIVE or receive.after is None:
            continue
        later = readers.get((receive.rank, receive.stage, receive.microbatch), [])
        reader = next((event for event in later if event.start >= receive.end), None)
        found.append(Transfer(send=trace.events[receive.after], receive=receive, reader=reader))
    return tuple(found)
