"""What long work is at, as a line of a terminal: a sign that it goes on, how much is done, and for how long.

    with working_on(sys.stderr):                 `cli` does this around every command, but for --json
        working_at("the search", 384, 5_000)     anywhere within: what comes next, and how much of it is done

Where there is no terminal, or nobody has asked, nothing is written. The line is drawn by `rich`, which is loaded when
the work has taken a moment; it is gone when the work is done, so that it stands in nobody's way.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TextIO

from shardwise import environment

# What is over sooner needs no line.
_PATIENCE_SECONDS = 0.5
_REFRESHES_PER_SECOND = 8


class _Line:
    def __init__(self, stream: TextIO) -> None:
        self._stream, self._lock = stream, threading.Lock()
        self._now: tuple[str, int | None, int | None] = ("", None, None)
        self._bar: Any = None
        self._has_ended = False
        self._timer = threading.Timer(_PATIENCE_SECONDS, self._begin)
        self._timer.daemon = True
        self._timer.start()

    def show(self, what: str, done: int | None, total: int | None) -> None:
        with self._lock:
            self._now = (what, done, total)
            self._draw()

    def end(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._has_ended = True
            if self._bar is not None:
                self._bar.stop()

    def _begin(self) -> None:
        with suppress(ImportError), self._lock:
            if not self._has_ended:
                self._bar = _make_bar(self._stream)
                self._bar.start()
                self._draw()

    def _draw(self) -> None:
        if self._bar is None or self._has_ended:
            return
        what, done, total = self._now
        much = "" if done is None else f"{done:,} of {total:,}" if total else f"{done:,}"
        self._bar.update(self._bar.task_ids[0], completed=done or 0, total=total, what=what, much=much)


_LINE: ContextVar[_Line | None] = ContextVar("line", default=None)


@contextmanager
def working_on(stream: TextIO) -> Iterator[None]:
    """Within it long work is shown on a stream, if that is a terminal."""
    line = _Line(stream) if environment.is_live(stream) else None
    before = _LINE.set(line)
    try:
        yield
    finally:
        _LINE.reset(before)
        if line is not None:
            line.end()


def working_at(what: str, done: int | None = None, total: int | None = None) -> None:
    """Say what comes next; and how much of it is done, of how much, where that is known."""
    line = _LINE.get()
    if line is not None:
        line.show(what, done, total)


def step_aside() -> None:
    """No more of it: something else draws on the terminal from now on."""
    line = _LINE.get()
    if line is not None:
        line.end()


def _make_bar(stream: TextIO) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(), TextColumn("{task.fields[what]}", markup=False), BarColumn(bar_width=20),
        TextColumn("{task.fields[much]}", markup=False), TimeElapsedColumn(),
    )  # fmt: skip
    bar = Progress(
        *columns, console=Console(file=stream), transient=True, refresh_per_second=_REFRESHES_PER_SECOND,
        redirect_stdout=False, redirect_stderr=False,
    )  # fmt: skip
    bar.add_task("", total=None, what="", much="")
    return bar
