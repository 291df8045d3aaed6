"""What a person sees while a model trains: a line now and then, on the error stream of the first rank."""

import contextlib
import sys

from shardwise.answer import canvas_on
from shardwise.units import format_bytes, format_percent


def line_of(
    step: int,
    num_steps: int,
    *,
    loss: float,
    rate: float,
    tokens_per_second: float,
    memory_bytes: float,
    bubble: float,
    imbalance: float | None = None,
    used: float | None = None,
) -> str:
    """What is known after a step. `used` is the part of the devices' peak that is used (MFU), where that is known;
    `imbalance` the load of the busiest expert over the mean, where there are experts."""
    parts = [
        f"step {step:>{len(str(num_steps))}}/{num_steps}",
        f"loss {loss:.4f}",
        f"rate {rate:.1e}",
        f"{_thousands(tokens_per_second)} tokens/s",
        *([] if used is None else [f"MFU {format_percent(used)}"]),
        f"fullest {format_bytes(memory_bytes)}",
        f"bubble {format_percent(bubble)}",
        *([] if imbalance is None else [f"imbalance {imbalance:.2f}"]),
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
