"""A trace in the JSON format of Chrome and Perfetto (ui.perfetto.dev): a process for each rank, a thread for each lane,
and for each stream of its GPU.

Format: "Trace Event Format", Google, 2016. Times there are microseconds; a second of ours is a million of them.
"""

from collections.abc import Iterator, Sequence
from itertools import count

from shardwise.trace.activities import short_name
from shardwise.trace.events import Event, Lane, Trace
from shardwise.trace.memory import held_by_owner, held_over_time
from shardwise.trace.streams import streams_of_ranks

_MICROSECONDS = 1e6
_LANES = tuple(Lane)
#: The thread of a rank's first stream: after all lanes, of which there are as many as overlap.
_FIRST_STREAM = 1_000_000
#: An entry of the format's list.
Entry = dict[str, object]


def to_perfetto(trace: Trace) -> dict[str, object]:
    """Return what `json.dump` writes into a file that Perfetto opens."""
    threads = _threads(trace)
    entries: list[Entry] = [*_names(trace, threads)]
    entries += [_complete(trace, event, threads[index]) for index, event in enumerate(trace.events)]
    entries += _flows(trace, threads)
    entries += _streams(trace)
    entries += _counters(trace)
    return {"traceEvents": entries, "displayTimeUnit": "ms", "otherData": {"name": trace.name}}


def _threads(trace: Trace) -> list[int]:
    """Return the thread of each event. A lane has several if its events overlap: a thread can show only one.

    Threads of one lane are numbered from its place in `Lane`, in steps of the number of lanes.
    """
    threads = [0] * len(trace.events)
    busy_until: dict[tuple[int, Lane], list[float]] = {}
    for index in sorted(range(len(threads)), key=lambda index: _moving(trace, trace.events[index])):
        event = trace.events[index]
        start, end = _moving(trace, event)
        free_from = busy_until.setdefault((event.rank, event.lane), [])
        place = next((place for place, time in enumerate(free_from) if time <= start), len(free_from))
        free_from[place : place + 1] = [end]
        threads[index] = _LANES.index(event.lane) + place * len(_LANES)
    return threads


def _moving(trace: Trace, event: Event) -> tuple[float, float]:
    """Return when an event is shown. A receive may be open for long: it is shown while its bytes move."""
    if event.lane is Lane.RECEIVE and event.after is not None:
        return trace.events[event.after].start, event.end
    return event.start, event.end


def _names(trace: Trace, threads: Sequence[int]) -> Iterator[Entry]:
    for rank in range(trace.num_ranks):
        yield _name("process_name", rank, 0, {"name": f"rank {rank}"})
        yield _name("process_sort_index", rank, 0, {"sort_index": rank})
    for rank, thread in sorted({(event.rank, thread) for event, thread in zip(trace.events, threads, strict=True)}):
        place, lane = divmod(thread, len(_LANES))
        yield _name("thread_name", rank, thread, {"name": _LANES[lane] + (f" {place + 1}" if place else "")})
        yield _name("thread_sort_index", rank, thread, {"sort_index": lane * len(threads) + place})


def _name(what: str, rank: int, thread: int, args: Entry) -> Entry:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": args}


def _complete(trace: Trace, event: Event, thread: int) -> Entry:
    start, end = _moving(trace, event)
    args: Entry = {"instruction": event.name, "stage": event.stage, "microbatch": event.microbatch}
    if event.peer is not None:
        args["peer"] = event.peer
    if event.lane is Lane.RECEIVE:
        args["posted_us"] = event.start * _MICROSECONDS
    return {
        "ph": "X",
        "name": event.name,
        "cat": str(event.lane),
        "pid": event.rank,
        "tid": thread,
        "ts": start * _MICROSECONDS,
        "dur": (end - start) * _MICROSECONDS,
        "args": args,
    }


def _streams(trace: Trace) -> Iterator[Entry]:
    """Yield the activities of GPUs, a thread for each stream, below the lanes of its rank."""
    for rank, uses in enumerate(streams_of_ranks(trace)):
        threads = {use.stream: _FIRST_STREAM + place for place, use in enumerate(uses)}
        for use in uses:
            thread = threads[use.stream]
            yield _name("thread_name", rank, thread, {"name": f"stream {use.stream} ({use.role})"})
            yield _name("thread_sort_index", rank, thread, {"sort_index": thread})
        for each in trace.activities_of_ranks[rank]:
            args: Entry = {"instruction": each.instruction, "full_name": each.name}
            if each.launched is not None:
                args["launched_us"] = each.launched * _MICROSECONDS
            yield {
                "ph": "X",
                "name": each.purpose or short_name(each.name),
                "cat": str(each.kind),
                "pid": rank,
                "tid": threads[each.stream],
                "ts": each.start * _MICROSECONDS,
                "dur": each.seconds * _MICROSECONDS,
                "args": args,
            }


def _flows(trace: Trace, threads: Sequence[int]) -> Iterator[Entry]:
    """Yield an arrow from each send to its receive."""
    numbers = count()
    for index, receive in enumerate(trace.events):
        if receive.lane is not Lane.RECEIVE or receive.after is None:
            continue
        send = trace.events[receive.after]
        both: Entry = {"name": send.name, "cat": "transfer", "id": next(numbers), "ts": send.start * _MICROSECONDS}
        yield {"ph": "s", "pid": send.rank, "tid": threads[receive.after], **both}
        # Bound to the enclosing slice, not to the next one.
        yield {"ph": "f", "bp": "e", "pid": receive.rank, "tid": threads[index], **both}


def _counters(trace: Trace) -> Iterator[Entry]:
    curves = [(rank, "held", "held", curve) for rank, curve in enumerate(held_over_time(trace))]
    curves += [(rank, owner, "bytes", curve) for (rank, owner), curve in held_by_owner(trace).items()]
    for rank, name, unit, curve in curves:
        for time, held in curve:
            yield {"ph": "C", "name": name, "pid": rank, "ts": time * _MICROSECONDS, "args": {unit: held}}
