"""The history of requests as a trace: one row per request, with what it waited for.

    name of an event    lane      the request
    prompt, tokens      compute   is in a step: a piece of its prompt, or its next token
    other prompts       wait      is in a step that others' prompts make longer; or waits for its turn behind them
    blocks              wait      waits for KV blocks, initially or after it was preempted
    a place             wait      waits until a running request ends
    the queue           wait      waits before it reaches the engine
    a tier              reload    reloads blocks from the host or from files
    rank 1              wait      is in a step that is longer because this rank computes longer than the others

`explain/doctor/requests.py` reads it by these names.
"""

from collections import OrderedDict
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from shardwise.serving.request import Load, Request, Token
from shardwise.serving.scheduler import Scheduler
from shardwise.trace.events import Event, Lane, Trace
from shardwise.trace.run import REQUESTS, Run, save_run

#: How many requests are kept, the latest; and events of each, adjacent ones with one name merged.
_MOST_REQUESTS, _MOST_EVENTS = 1000, 4000
#: A rank delays a step if it computes this many times as long as the median of the others.
_SLOW = 1.5
_WHY = {"blocks": "blocks", "tokens": "other prompts", "places": "a place"}


@dataclass(slots=True)
class _Row:
    id: str
    begun: float
    until: float
    num_prompt: int
    events: list[tuple[str, Lane, float, float]] = field(default_factory=list)

    def add(self, name: str, lane: Lane, end: float) -> None:
        """Record what it did since its last event. So its events add up to all of its time."""
        if end <= self.until:
            return
        if self.events and self.events[-1][:2] == (name, lane):
            self.events[-1] = name, lane, self.events[-1][2], end
        elif len(self.events) < _MOST_EVENTS:
            self.events.append((name, lane, self.until, end))
        self.until = end


class RecordedEngine:
    """An engine that records the history of its requests. It answers as the engine does."""

    def __init__(self, engine: Any, folder: Path) -> None:
        self._engine, self._folder = engine, folder
        self._rows: OrderedDict[str, _Row] = OrderedDict()
        self._open: dict[str, _Row] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add(self, request: Request) -> None:
        self._engine.add(request)
        now = monotonic()
        asked = now if request.asked_at is None else request.asked_at
        row = self._rows[request.id] = self._open[request.id] = _Row(request.id, asked, asked, len(request.prompt))
        row.add("the queue", Lane.WAIT, now)
        while len(self._rows) > _MOST_REQUESTS:
            self._rows.popitem(last=False)

    def step(self) -> list[Token]:
        begun = monotonic()
        told: list[Token] = self._engine.step()
        end = monotonic()
        for engine in getattr(self._engine, "engines", [self._engine]):
            scheduler = engine.scheduler
            self._note(scheduler, begun, end, getattr(engine.runner, "rank_seconds", []))
            late = {sequence.id for sequence in scheduler.running} - {each.sequence.id for each in scheduler.pieces}
            for name in late & self._open.keys():
                self._open[name].add("other prompts", Lane.WAIT, end)
            for sequence in scheduler.waiting:
                if sequence.id in self._open:
                    self._open[sequence.id].add(_WHY[scheduler.held_up or "tokens"], Lane.WAIT, end)
        for token in told:
            if token.finish is not None:
                self._open.pop(token.request, None)
        return told

    def load(self) -> Load:
        found: Load = self._engine.load()
        return found

    def close(self) -> None:
        self.save()
        self._engine.close()

    def save(self) -> None:
        """Write the trace as a run that `doctor` and `report` can read."""
        if self._rows:
            summary = self._engine.summary
            manifest = {"model": summary.model, "device": summary.device, "num_blocks": summary.num_blocks,
                        "requests": len(self._rows)}  # fmt: skip
            save_run(Run(name=self._folder.name, trace=self.trace()), self._folder, manifest=manifest)

    def trace(self) -> Trace:
        rows = list(self._rows.values())
        first = min((row.begun for row in rows), default=0.0)
        events = [
            Event(name, number, lane, start - first, end - first, 0, number)
            for number, row in enumerate(rows)
            for name, lane, start, end in row.events
        ]
        windows = tuple((row.begun - first, row.until - first) for row in rows)
        return Trace(name=f"{REQUESTS}{self._engine.summary.model}", num_ranks=len(rows), events=tuple(events),
                     windows=windows)  # fmt: skip

    def _note(self, scheduler: Scheduler, begun: float, end: float, ranks: Several[float]) -> None:
        """Record a step: for each request, first what made the step longer, then its own work."""
        pieces = scheduler.pieces
        total = sum(piece.count for piece in pieces)
        slow_rank, slow_seconds = _slow_rank(ranks)
        for piece in pieces:
            row = self._open.get(piece.sequence.id)
            if row is None:
                continue
            at = begun
            if scheduler.reload_seconds:  # The whole step waits for a reload, not only the requests that need it.
                at = min(begun + scheduler.reload_seconds, end)
                row.add("a tier", Lane.RELOAD, at)
            if slow_seconds:
                at = min(at + slow_seconds, end)
                row.add(f"rank {slow_rank}", Lane.WAIT, at)
            others = sum(each.count for each in pieces if each.count > 1 and each is not piece)
            if others:
                at += (end - at) * others / total
                row.add("other prompts", Lane.WAIT, at)
            row.add("prompt" if piece.start < row.num_prompt else "tokens", Lane.COMPUTE, end)


def _slow_rank(seconds: Several[float]) -> tuple[int, float]:
    """Return the rank that a step waited for and the seconds; no seconds if ranks took about equally long."""
    if len(seconds) < 2:
        return 0, 0.0
    slowest = max(range(len(seconds)), key=lambda rank: seconds[rank])
    usual = median(each for rank, each in enumerate(seconds) if rank != slowest)
    return slowest, seconds[slowest] - usual if seconds[slowest] > _SLOW * usual else 0.0
