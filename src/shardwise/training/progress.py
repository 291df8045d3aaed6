"""The progress of training, on the first rank's stderr: a bar on a terminal, and a line every few steps in a file or a
pipe."""

import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from shardwise import environment
from shardwise.answer import canvas_on
from shardwise.units import format_bytes, format_percent
from shardwise.working import working_at, working_on

#: How often the bar is redrawn. A thread draws it, which takes time from training.
_REFRESHES_PER_SECOND = 4


def line_of(step: int, num_steps: int, told: str) -> str:
    """Return a line of progress."""
    return f"step {step:>{len(str(num_steps))}}/{num_steps}  {told}"


def told_of(
    *,
    loss: float,
    rate: float,
    tokens_per_second: float,
    memory_bytes: float,
    bubble: float,
    imbalance: float | None = None,
    mfu: float | None = None,
    memory_share: float | None = None,
) -> str:
    """Return the measurements of a step as text. `mfu` is the share of the devices' peak FLOPs, if known.
    `memory_share` is the used share of the fullest device's memory. `imbalance` is the load of the busiest expert over
    the mean, if there are experts."""
    share = "" if memory_share is None else f" ({format_percent(memory_share)})"
    parts = [
        f"loss {loss:.4f}",
        f"rate {rate:.1e}",
        f"{thousands(tokens_per_second)} tokens/s",
        *([] if mfu is None else [f"MFU {format_percent(mfu)}"]),
        f"fullest {format_bytes(memory_bytes)}{share}",
        f"bubble {format_percent(bubble)}",
        *([] if imbalance is None else [f"imbalance {imbalance:.2f}"]),
    ]
    return "  ".join(parts)


class Progress:
    """Prints progress, if this is the first rank."""

    def __init__(self, *, speaks: bool) -> None:
        self._canvas = canvas_on(sys.stderr) if speaks else None
        self._bar: Any = None

    @contextmanager
    def bar(self, first: int, last: int) -> Iterator[None]:
        """Show a bar on a terminal within this context, from step `first` to `last`. Without `rich`, lines."""
        self._bar = None if self._canvas is None else _find_bar(self._canvas.stream, first, last)
        if self._bar is None:
            yield
            return
        try:
            with self._bar:
                yield
        finally:
            self._bar = None

    def step(self, step: int, num_steps: int, told: str | None) -> None:
        """Report a finished step. `told`, given every few steps, is printed as a line or beside the bar."""
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=step, **({} if told is None else {"told": told}))
        elif told is not None:
            self.say(line_of(step, num_steps, told))

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Show on a terminal, within this context, work that is not a step."""
        if self._canvas is None or self._bar is not None:
            yield
            return
        with working_on(self._canvas.stream):
            working_at(what)
            yield

    def say(self, text: str) -> None:
        if self._canvas is None:
            return
        # stderr may be a file on a full disk, or a closed pipe. Training continues.
        with contextlib.suppress(OSError):
            if self._bar is not None:
                from rich.text import Text

                self._bar.console.print(Text.from_ansi(text), soft_wrap=True)
                return
            self._canvas.print(text)
            self._canvas.stream.flush()

    def warn(self, text: str) -> None:
        if self._canvas is not None:
            self.say(f"{self._canvas.paint('warning:', 'bold yellow')} {text}")


def _find_bar(stream: TextIO, first: int, last: int) -> Any:
    """Return a bar for steps, if the stream is a terminal and `rich` is installed."""
    if not environment.is_live(stream):
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
        from rich.table import Column
    except ImportError:
        return None
    # On a narrow terminal only the text is shortened: step count and remaining time stay readable.
    columns = (
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=2 * len(str(last)) + 1)),
        BarColumn(bar_width=20, table_column=Column(min_width=8)),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True, min_width=5)),
        TextColumn("{task.fields[told]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
    )
    bar = Bar(
        *columns, console=Console(file=stream), refresh_per_second=_REFRESHES_PER_SECOND, redirect_stdout=False,
        redirect_stderr=False,
    )  # fmt: skip
    bar.add_task("", total=last, completed=first, told="")
    return bar


def thousands(number: float) -> str:
    """Return a short form of a number: 950, 12.3k, 1.23M."""
    if number < 1000:
        return f"{number:.0f}"
    return f"{number / 1000:.1f}k" if number < 1e6 else f"{number / 1e6:.2f}M"
