"""Whether a trace that was read from a file can be worked with: whoever draws or examines one need not ask again."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardwise.trace.events import Trace

_Kinds = frozenset[type]
_TEXT, _COUNT, _NUMBER = _Kinds({str}), _Kinds({int}), _Kinds({int, float})
_COUNT_OR_NONE = _Kinds({int, type(None)})
_KINDS: Mapping[str, _Kinds] = {
    "name": _TEXT,
    "rank": _COUNT,
    "lane": _TEXT,
    "start": _NUMBER,
    "end": _NUMBER,
    "stage": _COUNT,
    "microbatch": _COUNT,
    "held_at_start": _NUMBER,
    "held_at_end": _NUMBER,
    "after": _COUNT_OR_NONE,
    "peer": _COUNT_OR_NONE,
}


def check_columns(columns: Mapping[str, Any]) -> None:
    """Raise a `ValueError` if a column of events has something of another kind in it, or is longer than another."""
    for name, kinds in _KINDS.items():
        column = columns[name]
        if not isinstance(column, list):
            raise ValueError(f"the column {name}, which is no list")
        wrong = set(map(type, column)) - kinds
        if wrong:
            raise ValueError(f"a {wrong.pop().__name__} in the column {name}")
    lengths = {name: len(columns[name]) for name in _KINDS}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns of other lengths: {', '.join(f'{name} {count}' for name, count in lengths.items())}")


def check_trace(trace: Trace) -> None:
    """Raise a `ValueError` if times, ranks or what let what start cannot be."""
    if trace.num_ranks < 1:
        raise ValueError(f"{trace.num_ranks} ranks")
    if len(trace.windows) not in (0, trace.num_ranks):
        raise ValueError(f"{len(trace.windows)} windows of {trace.num_ranks} ranks")
    _check_times((event.start, event.end) for event in trace.events)
    _check_times(trace.windows)
    _check_numbers(number for event in trace.events for number in (event.held_at_start, event.held_at_end))
    _check_numbers(number for each in trace.holdings for number in (each.time, each.num_bytes))
    _check_numbers(number for each in trace.traffic for number in (each.num_messages, each.num_bytes))
    for events in (trace.events, trace.holdings, trace.traffic):
        if any(not 0 <= each.rank < trace.num_ranks for each in events):
            raise ValueError(f"a rank that is none of the {trace.num_ranks}")
    for sent in (trace.events, trace.traffic):
        if any(each.peer is not None and not 0 <= each.peer < trace.num_ranks for each in sent):
            raise ValueError(f"a peer that is none of the {trace.num_ranks} ranks")
    _check_order([event.after for event in trace.events])


def _check_times(pairs: Iterable[tuple[float, float]]) -> None:
    for start, end in pairs:
        if not (math.isfinite(start) and math.isfinite(end)) or start > end:
            raise ValueError(f"something from {start} to {end}")


def _check_numbers(numbers: Iterable[float]) -> None:
    for each in numbers:
        if not math.isfinite(each):
            raise ValueError(f"{each}, where a number should be")


def _check_order(after: Sequence[int | None]) -> None:
    """Following what let an event start must come to an end."""
    count = len(after)
    ends = [each is None for each in after]
    for first in range(count):
        path, place = set[int](), first
        while not ends[place]:
            if place in path:
                raise ValueError(f"event {place}, which waits for itself")
            path.add(place)
            following = after[place]
            if following is None:
                break
            if not 0 <= following < count:
                raise ValueError(f"event {place}, which waits for event {following} of {count}")
            place = following
        for each in path:
            ends[each] = True
