"""The history of a run, from its journal and its metrics: starts and why they ended, checkpoints, copies, slow ranks,
wrong numbers, and the loss.

Lines of a journal are in the order of events, but their times are from clocks of several machines, each of which may
jump. So the order has priority: a time earlier than that of the previous line is replaced by that one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from shardwise.trace.journal import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of the ranks: the step, whether from a copy in memory or a checkpoint on disk, and how it ended (None:
    no end was written)."""

    when: str
    step: int
    plan: str
    places: tuple[Mapping[str, Any], ...]
    attempt: str | None
    ended: str | None
    end_step: int | None
    why: str | None
    source: str | None = None

    @property
    def hosts(self) -> dict[str, list[int]]:
        """The ranks of each host."""
        found: dict[str, list[int]] = {}
        for place in self.places:
            found.setdefault(str(place["host"]), []).append(int(place["rank"]))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """A period, in seconds since the first line; `end` is None if it is not over."""

    begin: float
    end: float | None
    text: str
    is_bad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A run over time: seconds since its first line, which was at `began`. Clocks went back by `jumped` at most."""

    began: str
    seconds: float
    starts: tuple[Start, ...]
    ran: tuple[Period, ...]
    saved: tuple[tuple[float, int], ...]
    copied: tuple[tuple[float, int], ...]
    slow: tuple[Period, ...]
    corrupt: tuple[tuple[float, str], ...]
    losses: tuple[tuple[float, float], ...]
    jumped: float = 0.0


def starts_of(events: Sequence[Event]) -> tuple[Start, ...]:
    """Return every start with what ended it. A start without an end is explained by the next attempt."""
    places = [number for number, each in enumerate(events) if each["event"] == "start"]
    found = []
    for number, place in enumerate(places):
        start = events[place]
        until = places[number + 1] if number + 1 < len(places) else len(events)
        between = events[place + 1 : until]
        end = next((each for each in between if each["event"] == "end"), None)
        found.append(
            Start(
                when=str(start["when"]),
                step=int(start["step"]),
                plan=str(start["plan"]),
                places=tuple(start.get("places", ())),
                attempt=start.get("attempt"),
                ended=None if end is None else str(end["when"]),
                end_step=None if end is None else end.get("step"),
                why=_why(between, end, is_last=number + 1 == len(places)),
                source=start.get("source"),
            )
        )
    return tuple(found)


def _why(between: Sequence[Event], end: Event | None, *, is_last: bool) -> str | None:
    why = None if end is None else str(end["why"])
    after = next((str(each["after"]) for each in between if each["event"] == "attempt" and "after" in each), None)
    status = next((each["status"] for each in between if each["event"] == "attempt end"), None)
    if after is not None:
        return after if why is None else f"{after}: {why}"
    if why is None and status is not None:
        return f"ended with status {status}"
    return "ended without a word" if why is None and not is_last else why


def slow_now(events: Sequence[Event]) -> list[Event]:
    """Return the ranks that are slow, by the lines of the last start."""
    first = max((number for number, each in enumerate(events) if each["event"] == "start"), default=0)
    found: dict[tuple[Any, Any], Event] = {}
    for each in events[first:]:
        key = each.get("rank"), each.get("cause")
        if each["event"] == "slow":
            found[key] = each
        elif each["event"] == "slow over":
            found.pop(key, None)
    return list(found.values())


def history_of(events: Sequence[Event], rows: Iterable[Mapping[str, Any]]) -> History | None:
    """Return the history; None if there is no start."""
    known = [(each, time) for each in events if (time := _seconds(each.get("when"))) is not None]
    starts = starts_of([each for each, _ in known])
    if not starts:
        return None
    first, reached, jumped = known[0][1], known[0][1], 0.0
    told = []
    for each, time in known:
        jumped = max(jumped, reached - time)
        reached = max(reached, time)
        told.append((each, reached - first))
    losses = tuple((max(0.0, time - first), loss) for time, loss in _losses(rows))
    end = max([told[-1][1], *(time for time, _ in losses)])
    return History(
        began=str(known[0][0]["when"]),
        seconds=end,
        starts=starts,
        ran=tuple(_ran(told, starts)),
        saved=tuple((time, int(each["step"])) for each, time in told if each["event"] == "checkpoint"),
        copied=tuple((time, int(each["step"])) for each, time in told if each["event"] == "copy"),
        slow=tuple(_slow(told)),
        corrupt=tuple((time, str(each.get("what", ""))) for each, time in told if each["event"] == "corrupt"),
        losses=losses,
        jumped=jumped,
    )


def _ran(told: Sequence[tuple[Event, float]], starts: Sequence[Start]) -> Iterable[Period]:
    """Return periods from each start to its end; without an end, to the last line before the next start."""
    places = [number for number, (each, _) in enumerate(told) if each["event"] == "start"]
    for number, (place, start) in enumerate(zip(places, starts, strict=True)):
        until = places[number + 1] if number + 1 < len(places) else len(told)
        ends = [time for each, time in told[place:until] if each["event"] in ("end", "attempt end", "attempt")]
        end = ends[0] if ends else told[until][1] if until < len(told) else None
        text = f"from step {start.step}: {start.why or 'it runs'}"
        yield Period(begin=told[place][1], end=end, text=text, is_bad=start.why not in (None, "finished", "SIGUSR1"))


def _slow(told: Sequence[tuple[Event, float]]) -> Iterable[Period]:
    open_: dict[tuple[Any, Any], tuple[float, str]] = {}
    for each, time in told:
        key = each.get("rank"), each.get("cause")
        if each["event"] == "slow" and key not in open_:
            open_[key] = time, f"rank {each['rank']} on {each.get('host')}: {each['cause']}"
        ended = list(open_) if each["event"] in ("end", "start") else [key] if each["event"] == "slow over" else []
        for one in ended:
            if one in open_:
                begin, text = open_.pop(one)
                yield Period(begin=begin, end=time, text=text, is_bad=True)
    for begin, text in open_.values():
        yield Period(begin=begin, end=None, text=text, is_bad=True)


def _losses(rows: Iterable[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return times and losses of steps whose time was recorded."""
    losses: dict[int, float] = {}
    found = []
    for row in rows:
        if isinstance(row.get("loss"), (int, float)):
            losses[row["step"]] = float(row["loss"])
        time = _seconds(row.get("when"))
        if time is not None and row["step"] in losses:
            found.append((time, losses[row["step"]]))
    return found


def _seconds(when: object) -> float | None:
    try:
        return datetime.fromisoformat(str(when)).timestamp()
    except ValueError:
        return None
