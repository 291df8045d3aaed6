"""A trace as a file: JSON, a column for each field of an event, so that it is small and read quickly."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.trace.events import Event, Holding, Lane, Trace, Traffic
from shardwise.trace.sound import check_columns, check_trace

_FORMAT, _VERSION = "shardwise trace", 1
_COLUMNS = Event._fields


def save_trace(trace: Trace, path: Path) -> None:
    """Write a trace, whole or not at all."""
    write_whole(path, json.dumps(to_document(trace), separators=(",", ":")))


def write_whole(path: Path, text: str) -> None:
    """Write a file beside its place and move it there: what was there before stays, if there is no room."""
    beside = path.with_name(path.name + ".part")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def load_trace(path: Path) -> Trace:
    """Read a trace. One that was cut short, or is something else, is told apart."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ShardwiseError(f"the trace {path} cannot be read: {why}", remedy="the folder of a run") from None
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        is_short = error.pos >= len(text.rstrip()) - 1 or "Unterminated" in error.msg
        raise ShardwiseError(
            f"the trace {path} {'is cut short' if is_short else 'is no JSON'} at character {error.pos} of {len(text)}",
            remedy="a run whose profile ended, or shardwise profile again",
        ) from None
    return from_document(document, source=path.name)


def to_document(trace: Trace) -> dict[str, Any]:
    """The trace in JSON's own types."""
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
    }


def from_document(document: Any, *, source: str = "the trace") -> Trace:
    """The trace that `to_document` has made a document of."""
    if not isinstance(document, Mapping) or document.get("format") != _FORMAT:
        raise ShardwiseError(
            f"{source} is no trace of Shardwise: its format is not '{_FORMAT}'", remedy="the trace.json of a run"
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
    check_columns(given)
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
    )
    check_trace(trace)
    return trace
