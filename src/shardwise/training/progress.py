"""What a person sees while a model trains: a line now and then, on the error stream of the first rank."""

import contextlib
import sys
from dataclasses import dataclass

from shardwise.answer import canvas_on
from shardwise.units import format_bytes, format_percent


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What is known after a step. `used` is the part of the devices' peak that is used (MFU), where that is known;
    `imbalance` the load of the busiest expert over the mean, where there are experts."""

    step: int
    num_steps: int
    loss: float
    rate: float
    tokens_per_second: float
    memory_bytes: float
    bubble: float
    imbalance: float | None = None
    used: float | None = None

    def __str__(self) -> str:
        width = len(str(self.num_steps))
        parts = [
            f"step {self.step:>{width}}/{self.num_steps}",
            f"loss {self.loss:.4f}",
            f"rate {self.rate:.1e}",
            f"{_thousands(self.tokens_per_second)} tokens/s",
            *([] if self.used is None else [f"MFU {format_percent(self.used)}"]),
            f"fullest {format_bytes(self.memory_bytes)}",
            f"bubble {format_percent(self.bubble)}",
            *([] if self.imbalance is None else [f"imbalance {self.imbalance:.2f}"]),
        ]
        return "  ".join(parts)


class Progress:
    """Says things, if this is the first rank."""

    def __init__(self, *, speaks: bool) -> None:
        self._canvas = canvas_on(sys.stderr) if speaks else None

    def say(self, text: str) -> None:
        if self._canvas is None:
            return
        # Lines may go to a file on a disk that is full, or to a pipe that nobody reads any more: training goes on.
        with contextlib.suppress(OSError):
            self._canvas.print(text)
            self._canvas.stream.flush()

    def warn(self, text: str) -> None:
        if self._canvas is not None:
            self.say(f"{self._canvas.paint('warning:', 'bold yellow')} {text}")


def _thousands(number: float) -> str:
    if number < 1000:
        return f"{number:.0f}"
    return f"{number / 1000:.1f}k" if number < 1e6 else f"{number / 1e6:.2f}M"
