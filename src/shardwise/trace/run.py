"""A run as the doctor and the report see it: measurements, predictions, the plan, and its environment.

    RUN/trace.json        what happened in one step, on all ranks
    RUN/predicted.json    the same step as it was predicted, where it was
    RUN/plan.toml         the plan, with its reasons
    RUN/manifest.json     versions, hardware, seed, command
    RUN/metrics.jsonl     loss, speed and more of each step, where it was trained
    RUN/journal.jsonl     starts, ends, checkpoints and slow ranks, with their times

A trace alone is a run too.
"""

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.errors import ShardwiseError
from shardwise.output import write_whole
from shardwise.trace.events import Trace
from shardwise.trace.file import load_trace, save_trace
from shardwise.trace.history import History, history_of
from shardwise.trace.journal import read_journal
from shardwise.trace.metrics import Curve, curves_of, read_metrics
from shardwise.units import format_number, format_seconds

TRACE, PREDICTED, PLAN, MANIFEST = "trace.json", "predicted.json", "plan.toml", "manifest.json"

#: The prefix of a trace's name if its rows are served requests, not ranks.
REQUESTS = "requests to "


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A key of the plan, its value, and the reason."""

    key: str
    value: str
    reason: str = ""


class Unit(NamedTuple):
    """A unit of a model, which is not cut between stages: its relative cost, and the bytes of its weights."""

    cost: float
    weight_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run. `unit` is that of its times: "s", or "F" where they are simulated, the forward of an average stage.

    `facts` are about the run as a whole, by name. `memory_bytes` is what a device has, if known. `units` are those of
    each stage, if known. `alike` are, for each rank of the trace, the ranks of the whole plan that do what it does;
    none where the trace has them all. `curves` are the metrics of its steps, `history` what became of it over time.
    """

    name: str
    trace: Trace
    predicted: Trace | None = None
    plan: tuple[Choice, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    unit: str = "s"
    memory_bytes: float | None = None
    units: tuple[tuple[Unit, ...], ...] = ()
    alike: tuple[tuple[int, ...], ...] = ()
    curves: Mapping[str, Curve] = field(default_factory=dict)
    history: History | None = None

    def time(self, seconds: float) -> str:
        """Return a readable time, with its unit."""
        return format_seconds(seconds) if self.unit == "s" else f"{format_number(seconds, 4)} {self.unit}".rstrip()

    @property
    def is_of_requests(self) -> bool:
        return self.trace.name.startswith(REQUESTS)

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the whole plan."""
        return sum(map(len, self.alike)) or self.trace.num_ranks

    def rank_name(self, rank: int) -> str:
        """Return the name of a rank of the trace: the first that it stands for, and how many they are. Or a request."""
        if self.is_of_requests:
            return f"request {rank}"
        if not self.alike:
            return f"rank {rank}"
        same = self.alike[rank]
        return f"rank {same[0]}" if len(same) == 1 else f"rank {same[0]} x {len(same)}"


def load_run(path: Path) -> Run:
    """Read the folder of a run, or a trace alone."""
    if not path.exists():
        raise ShardwiseError(
            f"there is no run at {path}", remedy="the folder that shardwise profile or shardwise train has written"
        )
    if path.is_file():
        return Run(name=path.name.removesuffix(".json"), trace=load_trace(path))
    if not (path / TRACE).is_file():
        raise ShardwiseError(
            f"the folder {path} has no {TRACE}, so there is no record of its steps",
            remedy="shardwise profile, which measures some steps and writes it",
        )
    predicted = load_trace(path / PREDICTED) if (path / PREDICTED).is_file() else None
    manifest = _read(path / MANIFEST, f"{path / MANIFEST}", json.loads)
    facts = {key: _fact(value) for key, value in manifest.items() if isinstance(value, (str, int, float))}
    memory, rows = manifest.get("device_memory_bytes"), read_metrics(path)
    return Run(
        name=path.resolve().name,
        trace=load_trace(path / TRACE),
        predicted=predicted,
        plan=choices_of(_read(path / PLAN, f"the plan {path / PLAN}", tomllib.loads)),
        facts=facts,
        memory_bytes=float(memory) if isinstance(memory, (int, float)) else None,
        units=_units_of(manifest),
        curves=curves_of(rows),
        history=history_of(read_journal(path), rows),
    )


def _units_of(manifest: Mapping[str, Any]) -> tuple[tuple[Unit, ...], ...]:
    """Return the units; none if the manifest is malformed: the doctor then assumes that all are equal."""
    try:
        return tuple(
            tuple(Unit(float(cost), float(size)) for cost, size in stage) for stage in manifest.get("units", ())
        )
    except (TypeError, ValueError):
        return ()


def save_run(run: Run, folder: Path, *, plan: str | None = None, manifest: Mapping[str, Any] | None = None) -> None:
    """Write everything that a report needs into a folder. `plan` is the text of `plan.toml`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_trace(run.trace, folder / TRACE)
    if run.predicted is not None:
        save_trace(run.predicted, folder / PREDICTED)
    if plan is not None:
        write_whole(folder / PLAN, plan)
    if manifest is not None:
        write_whole(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")


def choices_of(tree: Mapping[str, Any]) -> tuple[Choice, ...]:
    """Return the keys of a plan's file form, each with its reason."""
    reasons = tree.get("reasons", {})
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if key == "reasons":
            continue
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": each for inner, each in value.items()}
        else:
            flat[key] = value
    return tuple(Choice(key=key, value=_word(value), reason=str(reasons.get(key, ""))) for key, value in flat.items())


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)


def _fact(value: str | float) -> str:
    return format_number(value, 5) if isinstance(value, float) else str(value)


def _read(path: Path, what: str, parse: Callable[[str], Any]) -> Mapping[str, Any]:
    """Read an optional file of a run."""
    if not path.is_file():
        return {}
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # Text, JSON and TOML errors are all ValueErrors.
        raise ShardwiseError(f"{what} cannot be read: {error}", remedy=f"a run without {path.name}") from None
    return found if isinstance(found, Mapping) else {}
