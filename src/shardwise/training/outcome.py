"""How a run ends: with an outcome, or stopped for a reason that all ranks know."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.trace.events import Trace


class StoppedError(ShardwiseError):
    """A run cannot go on, for a reason that all ranks know: it is told once, without their tracebacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a run, as its first rank tells it."""

    step: int
    loss: float | None
    held_out_loss: float | None
    seconds: float
    num_tokens: int
    num_parameters: int
    model: Mapping[str, Any]
    data: Mapping[str, Any]
    checkpoint: Path | None
    trace: Trace | None
    layers: str
    expert_imbalance: float | None = None
    stopped_by: str | None = None
