"""A trace as a file: JSON, a column for each field of an event, so that it is small and read quickly.

A trace is validated when it is read, so that code that draws or examines it need not check it again.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.output import write_whole
from shardwise.trace.activities import Activity, ActivityKind
from shardwise.trace.events import Event, Holding, Lane, Trace, Traffic

_FORMAT, _VERSION = "shardwise trace", 1
_COLUMNS = Event._fields

#: The JSON types of each field of an event.
_JSON: dict[object, set[type]] = {str: {str}, Lane: {str}, int: {int}, float: {int, float}, int | None: {int, NoneType}}
_KINDS = {name: _JSON[hint] for name, hint in Event.__annotations__.items()}
#: The same for an activity of a GPU, whose texts are indices into a list.
_ACTIVITY_KINDS: dict[str, set[type]] = {
    name: {int} if hint in (str, ActivityKind) else _JSON.get(hint, {int, float, NoneType})
    for name, hint in Activity.__annotations__.items()
}


def save_trace(trace: Trace, path: Path) -> None:
    """Write a trace, whole or not at all."""
    write_whole(path, json.dumps(to_document(trace), separators=(",", ":")))


def load_trace(path: Path) -> Trace:
    """Read a trace. Errors distinguish a truncated file from one that is something else."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ShardwiseError(f"the trace {path} cannot be read: {why}", remedy="the folder of a run") from None
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        is_short = error.pos >= len(text.rstrip()) - 1 or "Unterminated" in error.msg
        what = "is cut short" if is_short else "is not valid JSON"
        raise ShardwiseError(
            f"the trace {path} {what} at character {error.pos} of {len(text)}",
            remedy="a run whose profile ended, or shardwise profile again",
        ) from None
    return from_document(document, source=path.name)


def to_document(trace: Trace) -> dict[str, Any]:
    """Return the trace in JSON types."""
    columns = zip(*trace.events, strict=True) if trace.events else ([] for _ in _COLUMNS)
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "name": trace.name,
        "num_ranks": trace.num_ranks,
        "windows": trace.windows,
        "events": {name: list(column) for name, column in zip(_COLUMNS, columns, strict=True)},
        "holdings": trace.holdings,
        "traffic": trace.traffic,
        **({"activities": _activities_document(trace.activities)} if trace.activities else {}),
    }


def _activities_document(activities: Sequence[Activity]) -> dict[str, Any]:
    """Return a column for each field. Texts repeat, so a column of them has indices into one list."""
    texts: dict[str, int] = {}
    columns: dict[str, list[Any]] = {}
    for name, column in zip(Activity._fields, zip(*activities, strict=True), strict=True):
        is_text = Activity.__annotations__[name] in (str, ActivityKind)
        columns[name] = [texts.setdefault(each, len(texts)) for each in column] if is_text else list(column)
    return {"texts": list(texts), "columns": columns}


def from_document(document: Any, *, source: str = "the trace") -> Trace:
    """Return the trace of a document made by `to_document`."""
    if not isinstance(document, Mapping) or document.get("format") != _FORMAT:
        raise ShardwiseError(
            f"{source} is not a trace of Shardwise: its format is not '{_FORMAT}'", remedy="the trace.json of a run"
        )
    if document.get("version") != _VERSION:
        raise ShardwiseError(
            f"{source} is a trace of version {document.get('version')}, and this Shardwise reads {_VERSION}",
            remedy="shardwise profile again, with this version",
        )
    try:
        return _read(document)
    except (KeyError, TypeError, ValueError) as error:
        raise ShardwiseError(
            f"{source} is a damaged trace: {type(error).__name__} at {error}", remedy="shardwise profile again"
        ) from None


def _read(document: Mapping[str, Any]) -> Trace:
    given = document["events"]
    _check_columns(given, _KINDS)
    columns = [given[name] for name in _COLUMNS]
    lane = _COLUMNS.index("lane")
    columns[lane] = [Lane(word) for word in columns[lane]]
    trace = Trace(
        name=str(document["name"]),
        num_ranks=int(document["num_ranks"]),
        events=tuple(Event(*row) for row in zip(*columns, strict=True)),
        windows=tuple((start, end) for start, end in document["windows"]),
        holdings=tuple(Holding(*row) for row in document["holdings"]),
        traffic=tuple(Traffic(*row) for row in document["traffic"]),
        activities=_read_activities(document["activities"]) if "activities" in document else (),
    )
    _check_trace(trace)
    return trace


def _read_activities(document: Mapping[str, Any]) -> tuple[Activity, ...]:
    """Return the activities of GPUs; a trace of an older version has none."""
    texts, columns = document["texts"], document["columns"]
    _check_columns(columns, _ACTIVITY_KINDS)
    read = []
    for name, hint in Activity.__annotations__.items():
        column = columns[name]
        if hint in (str, ActivityKind):
            if any(not 0 <= place < len(texts) for place in column):
                raise ValueError(f"a text that is none of the {len(texts)}, in the column {name}")
            column = [hint(texts[place]) for place in column]
        read.append(column)
    return tuple(map(Activity, *read))


def _check_columns(columns: Mapping[str, Any], expected: Mapping[str, set[type]]) -> None:
    """Raise a `ValueError` if a column has something of another kind in it, or is longer than another."""
    for name, kinds in expected.items():
        column = columns[name]
        if not isinstance(column, list):
            raise ValueError(f"the column {name}, which is not a list")
        wrong = set(map(type, column)) - kinds
        if wrong:
            raise ValueError(f"a {wrong.pop().__name__} in the column {name}")
    lengths = {name: len(columns[name]) for name in expected}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns of other lengths: {', '.join(f'{name} {count}' for name, count in lengths.items())}")


def _check_trace(trace: Trace) -> None:
    """Raise a `ValueError` if times, ranks or what let what start cannot be."""
    if trace.num_ranks < 1:
        raise ValueError(f"{trace.num_ranks} ranks")
    if len(trace.windows) not in (0, trace.num_ranks):
        raise ValueError(f"{len(trace.windows)} windows of {trace.num_ranks} ranks")
    if trace.activities and not trace.windows:
        raise ValueError("activities of a GPU in a step that was not measured")
    _check_times((event.start, event.end) for event in trace.events)
    _check_times(trace.windows)
    _check_times((each.start, each.end) for each in trace.activities)
    _check_numbers(number for event in trace.events for number in (event.held_at_start, event.held_at_end))
    _check_numbers(each.launched for each in trace.activities if each.launched is not None)
    _check_numbers(number for each in trace.holdings for number in (each.time, each.num_bytes))
    _check_numbers(number for each in trace.traffic for number in (each.num_messages, each.num_bytes))
    for events in (trace.events, trace.holdings, trace.traffic, trace.activities):
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
    """Check that the chain of `after` of every event ends."""
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
