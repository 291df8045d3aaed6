"""The interface of every place where a run can be started: a text to show, checks, and a job that can be followed."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A submitted job: its name there, its log, and its state.

    `state` is polled; `is_over` says whether a state means that the job has ended, `is_good` whether it succeeded.
    `stop` is the command that ends it.
    """

    job: str
    log: Path | None
    state: Callable[[], str]
    is_over: Callable[[str], bool]
    is_good: Callable[[str], bool]
    stop: str


class Target(Protocol):
    """A place where a run can be started. `check` refuses before anything is written or submitted."""

    @property
    def on(self) -> str: ...

    @property
    def path(self) -> Path: ...

    def text(self) -> str: ...

    def check(self) -> None: ...

    def submit(self) -> Submitted: ...


def follow(submitted: Submitted, stream: TextIO) -> str:
    """Print the job's log until it is over. Returns its last state."""
    place, before = 0, ""
    while True:
        state = submitted.state()
        place = _copy(submitted.log, place, stream)
        if state != before and submitted.log is not None:
            stream.write(f"[{submitted.job}: {state}]\n")
            stream.flush()
        before = state
        if submitted.is_over(state):
            _copy(submitted.log, place, stream)
            return state
        time.sleep(_POLL_SECONDS)


def _copy(log: Path | None, place: int, stream: TextIO) -> int:
    """Copy what was added to the log."""
    if log is None or not log.exists():
        return place
    with log.open("rb") as file:
        file.seek(place)
        new = file.read()
    stream.write(new.decode(errors="replace"))
    stream.flush()
    return place + len(new)
