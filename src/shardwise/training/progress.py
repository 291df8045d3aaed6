"""What a person sees while a model trains, on the error stream of the first rank: a bar where that is a terminal, and
a line now and then where it is a file or a pipe."""

import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from shardwise import environment
from shardwise.answer import canvas_on
from shardwise.units import format_bytes, format_percent
from shardwise.working import working_at, working_on

#: How often a bar is drawn again: a thread does that, and takes time from training.
_REFRESHES_PER_SECOND = 4


def line_of(step: int, num_steps: int, told: str) -> str:
    """A line of progress."""
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
    """What is known after a step. `mfu` is the part of the devices' peak that is used, where that is known, and
    `memory_share` the part of the fullest device's memory; `imbalance` the load of the busiest expert over the mean,
    where there are experts."""
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
    """Says things, if this is the first rank."""

    def __init__(self, *, speaks: bool) -> None:
        self._canvas = canvas_on(sys.stderr) if speaks else None
        self._bar: Any = None

    @contextmanager
    def bar(self, first: int, last: int) -> Iterator[None]:
        """Within it a terminal shows a bar, from one step to another. Without `rich` there are lines."""
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
        """A step is over; what is told of it now and then is a line, or the words beside a bar."""
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=step, **({} if told is None else {"told": told}))
        elif told is not None:
            self.say(line_of(step, num_steps, told))

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Within it a terminal shows that something goes on which is no step."""
        if self._canvas is None or self._bar is not None:
            yield
            return
        with working_on(self._canvas.stream):
            working_at(what)
            yield

    def say(self, text: str) -> None:
        if self._canvas is None:
            return
        # Lines may go to a file on a disk that is full, or to a pipe that nobody reads any more: training goes on.
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
    """A bar for steps, if the stream is a terminal and there is what draws one."""
    if not environment.is_live(stream):
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
        from rich.table import Column
    except ImportError:
        return None
    # Where a line is short, what is told is: how far it is, and for how long yet, can always be read.
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
    """A number in as few figures as tell enough."""
    if number < 1000:
        return f"{number:.0f}"
    return f"{number / 1000:.1f}k" if number < 1e6 else f"{number / 1e6:.2f}M"
