"""A trace as the page's script reads it: columns of numbers in base64, times in whole ticks."""

import sys
from array import array
from base64 import b64encode
from collections.abc import Iterable, Sequence

from shardwise.trace.events import Event, Lane, Trace
from shardwise.trace.memory import held_by_owner, held_over_time
from shardwise.trace.stretches import BUSY, Part, Stretch

#: Ticks of a step: fine enough for a nanosecond in a second, and they fit in 32 bits.
_TICKS = 2**30
_CODES = {"u8": "B", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "f32": "f"}
LANES = tuple(Lane)
PARTS = tuple(Part)
#: What has a box or a strip of its own. Standing still is drawn as the gap that it is.
_DRAWN = frozenset({Lane.COMPUTE, Lane.STEP, Lane.SEND, Lane.COLLECTIVE, Lane.OFFLOAD, Lane.RELOAD})
#: What a trace that counts no bytes counts.
ACTIVATIONS = "activations"

Column = tuple[str, str]


def encode(trace: Trace, cut: Sequence[Sequence[Stretch]], *, label: str) -> dict[str, object]:
    """What `decode.js` reads. `cut` are the trace's stretches."""
    drawn = [event for event in trace.events if event.lane in _DRAWN and event.end > event.start]
    clock = _Clock(trace)
    gaps = [each for rank in cut for each in rank if each.part not in BUSY]
    reasons = list(dict.fromkeys(_reason(gap) for gap in gaps))
    places = {reason: place for place, reason in enumerate(reasons)}
    curves = held_by_owner(trace) or {
        (rank, ACTIVATIONS): curve for rank, curve in enumerate(held_over_time(trace)) if curve
    }
    return {
        "label": label,
        "ranks": trace.num_ranks,
        "tick": clock.tick,
        "length": _TICKS,
        "names": "\n".join(event.name for event in drawn),
        "columns": _columns(drawn, clock),
        "gaps": {
            "rank": column("u16", (gap.rank for gap in gaps)),
            "part": column("u8", (PARTS.index(gap.part) for gap in gaps)),
            "begin": column("u32", (clock.of(gap.start) for gap in gaps)),
            "end": column("u32", (clock.of(gap.end) for gap in gaps)),
            "on": column("i32", (places[_reason(gap)] for gap in gaps)),
        },
        "reasons": "\n".join(reasons),
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


class _Clock:
    """Times of a trace as whole ticks from its start."""

    def __init__(self, trace: Trace) -> None:
        self._start = trace.start
        self.tick = (trace.makespan or 1.0) / _TICKS

    def of(self, time: float) -> int:
        return min(max(round((time - self._start) / self.tick), 0), _TICKS)


def column(kind: str, values: Iterable[float]) -> Column:
    """Numbers as the page has them: little-endian."""
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


def _reason(gap: Stretch) -> str:
    if gap.on is None:
        return ""
    return gap.on if gap.on_rank is None else f"{gap.on} of rank {gap.on_rank}"
