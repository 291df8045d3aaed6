"""What an event is called in a drawing: its kind's letter, its microbatch, and which of its rank's chunks it is of.

    F0  B3  I3  W3      a rank's first chunk (or only one)
    f0  b3  i3  w3      its second
    F3b1                an overlapped pair, each half by its own chunk
    8F0                 where a rank has more than two chunks, the event's name as it is
    S   s               a step

A trace knows only the names of its events; their form is that of the schedule language.
"""

import re
from typing import NamedTuple

from shardwise.trace.events import Event, Lane, Trace

_NAME = re.compile(r"(\d+)([A-Z])[A-Z_]*(\d+)")
_MOST_CASES = 2  # Upper and lower.
#: The meaning of the letters.
WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "S": "step"}


class EventPart(NamedTuple):
    """A whole event, or one half of an overlapped pair."""

    kind: str
    microbatch: int
    chunk: int


#: The chunk of each stage of one rank.
Chunks = dict[int, int]


def chunks_of_ranks(trace: Trace) -> tuple[Chunks, ...]:
    """Return the stages of each rank numbered in order: those that it was seen to compute."""
    found = []
    for events in trace.compute:
        stages = {stage for event in events for stage, _, _ in _read(event)}
        found.append({stage: chunk for chunk, stage in enumerate(sorted(stages))})
    return tuple(found)


def parts_of(event: Event, chunks: Chunks) -> tuple[EventPart, ...]:
    """Return the event, or its two halves."""
    return tuple(EventPart(kind, microbatch, chunks.get(stage, 0)) for stage, kind, microbatch in _read(event))


def stages_of(event: Event) -> list[tuple[int, int]]:
    """Return stage and microbatch of each part."""
    return [(stage, microbatch) for stage, _, microbatch in _read(event)]


def label_of(event: Event, chunks: Chunks) -> tuple[str, ...]:
    """Return the label of the event, part by part."""
    if event.lane is Lane.STEP:
        return (_in_case("S", chunks.get(event.stage, 0) % _MOST_CASES),)
    parts = parts_of(event, chunks)
    if len(chunks) > _MOST_CASES:
        first, *others = event.name.split("&") if len(parts) > 1 else [event.name]
        return (first, *(f"&{other}" for other in others))
    return tuple(_in_case(f"{part.kind}{part.microbatch}", part.chunk) for part in parts)


def _in_case(text: str, chunk: int) -> str:
    return text.lower() if chunk else text


def _read(event: Event) -> list[tuple[int, str, int]]:
    """Return stage, kind and microbatch of each part. For a name of another form, the first letter is its kind."""
    found = []
    for name in event.name.split("&"):
        match = _NAME.fullmatch(name)
        if match is None:
            return [(event.stage, next((letter for letter in name.upper() if letter.isalpha()), "?"), event.microbatch)]
        stage, kind, microbatch = match.groups()
        found.append((int(stage), kind, int(microbatch)))
    return found
