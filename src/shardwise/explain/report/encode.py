"""A trace in the encoding of the page's script: columns of numbers in base64, times in integer ticks."""

import sys
from array import array
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence

from shardwise.trace.activities import Activity, ActivityKind, short_name
from shardwise.trace.events import Event, Lane, Trace
from shardwise.trace.memory import held_by_owner, held_over_time
from shardwise.trace.streams import streams_of_ranks, word_of
from shardwise.trace.stretches import BUSY, Part, Stretch

#: Ticks of a step: fine enough for a nanosecond in a second, and they fit in 32 bits.
_TICKS = 2**30
_CODES = {"u8": "B", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "f32": "f"}
LANES = tuple(Lane)
PARTS = tuple(Part)
ACTIVITY_KINDS = tuple(ActivityKind)
#: In a column of times: none is known.
_NEVER = 2**32 - 1
#: What has a box or a strip of its own. Standing still is drawn as the gap that it is.
_DRAWN = frozenset({Lane.COMPUTE, Lane.STEP, Lane.SEND, Lane.COLLECTIVE, Lane.OFFLOAD, Lane.RELOAD})
#: What a trace that counts no bytes counts.
ACTIVATIONS = "activations"

Column = tuple[str, str]


def encode(
    trace: Trace, cut: Sequence[Sequence[Stretch]], *, label: str, rank_name: Callable[[int], str]
) -> dict[str, object]:
    """Return the input of `decode.js`. `cut` are the trace's stretches."""
    drawn = [event for event in trace.events if event.lane in _DRAWN and event.end > event.start]
    clock = _Clock(trace)
    gaps = [each for rank in cut for each in rank if each.part not in BUSY]
    reasons = list(dict.fromkeys(_reason(gap, rank_name) for gap in gaps))
    places = {reason: place for place, reason in enumerate(reasons)}
    curves = held_by_owner(trace) or {
        (rank, ACTIVATIONS): curve for rank, curve in enumerate(held_over_time(trace)) if curve
    }
    return {
        "label": label,
        "ranks": trace.num_ranks,
        "rankNames": [rank_name(rank) for rank in range(trace.num_ranks)],
        "tick": clock.tick,
        "length": _TICKS,
        "names": "\n".join(event.name for event in drawn),
        "columns": _columns(drawn, clock),
        "gaps": {
            "rank": column("u16", (gap.rank for gap in gaps)),
            "part": column("u8", (PARTS.index(gap.part) for gap in gaps)),
            "begin": column("u32", (clock.of(gap.start) for gap in gaps)),
            "end": column("u32", (clock.of(gap.end) for gap in gaps)),
            "on": column("i32", (places[_reason(gap, rank_name)] for gap in gaps)),
        },
        "reasons": "\n".join(reasons),
        **_streams(trace, clock),
        "held": [
            {
                "rank": rank,
                "owner": owner,
                "columns": {
                    "time": column("u32", (clock.of(time) for time, _ in curve)),
                    "value": column("f32", (held for _, held in curve)),
                },
            }
            for (rank, owner), curve in curves.items()
        ],
    }


def _streams(trace: Trace, clock: "_Clock") -> dict[str, object]:
    """Return the lanes of each rank's GPU, and the texts that their columns index."""
    texts: dict[str, int] = {}
    lanes = []
    for rank, uses in enumerate(streams_of_ranks(trace)):
        for use in uses:
            mine = [each for each in trace.activities_of_ranks[rank] if each.stream == use.stream]
            columns = _lane_columns(mine, clock, texts)
            lanes.append({"rank": rank, "stream": use.stream, "role": use.role, "columns": columns})
    return {"streams": lanes, "texts": "\n".join(texts)} if lanes else {}


def _lane_columns(activities: Sequence[Activity], clock: "_Clock", texts: dict[str, int]) -> dict[str, Column]:
    def place(text: str) -> int:
        return texts.setdefault(text.replace("\n", " "), len(texts))

    launched = (_NEVER if each.launched is None else clock.of(each.launched) for each in activities)
    return {
        "kind": column("u8", (ACTIVITY_KINDS.index(each.kind) for each in activities)),
        "begin": column("u32", (clock.of(each.start) for each in activities)),
        "end": column("u32", (clock.of(each.end) for each in activities)),
        "launched": column("u32", launched),
        "name": column("u32", (place(short_name(each.name)) for each in activities)),
        "word": column("u32", (place(each.purpose or word_of(each)) for each in activities)),
        "instruction": column("u32", (place(each.instruction) for each in activities)),
    }


class _Clock:
    """Times of a trace as integer ticks from its start."""

    def __init__(self, trace: Trace) -> None:
        self._start = trace.start
        self.tick = (trace.makespan or 1.0) / _TICKS

    def of(self, time: float) -> int:
        return min(max(round((time - self._start) / self.tick), 0), _TICKS)


def column(kind: str, values: Iterable[float]) -> Column:
    """Return numbers in the page's format: little-endian."""
    numbers = array(_CODES[kind], values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return kind, b64encode(numbers.tobytes()).decode("ascii")


def _columns(events: Sequence[Event], clock: _Clock) -> dict[str, Column]:
    return {
        "rank": column("u16", (event.rank for event in events)),
        "lane": column("u8", (LANES.index(event.lane) for event in events)),
        "begin": column("u32", (clock.of(event.start) for event in events)),
        "end": column("u32", (clock.of(event.end) for event in events)),
        "stage": column("i16", (event.stage for event in events)),
        "microbatch": column("i32", (event.microbatch for event in events)),
        "peer": column("i16", (-1 if event.peer is None else event.peer for event in events)),
    }


def _reason(gap: Stretch, rank_name: Callable[[int], str]) -> str:
    if gap.on is None:
        return ""
    return gap.on if gap.on_rank is None else f"{gap.on} of {rank_name(gap.on_rank)}"
