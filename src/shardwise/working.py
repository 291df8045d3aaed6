"""The progress of long work, as a line on a terminal: a spinner, how much is done, and the elapsed time.

    with working_on(sys.stderr):                 `cli` does this around every command, except for --json
        working_at("the search", 384, 5_000)     anywhere within: the current work, and how much of it is done

Without a terminal, or outside of `working_on`, nothing is written. `rich` draws the line, and is loaded only if the
work takes a while. The line is erased when the work is done.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TextIO

from shardwise import environment

# Shorter work gets no line.
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
    """Show long work on a stream within this context, if the stream is a terminal."""
    line = _Line(stream) if environment.is_live(stream) else None
    before = _LINE.set(line)
    try:
        yield
    finally:
        _LINE.reset(before)
        if line is not None:
            line.end()


def working_at(what: str, done: int | None = None, total: int | None = None) -> None:
    """Report the current work, how much of it is done, and the total, if known."""
    line = _LINE.get()
    if line is not None:
        line.show(what, done, total)


def step_aside() -> None:
    """Stop showing the line, because something else draws on the terminal from now on."""
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
