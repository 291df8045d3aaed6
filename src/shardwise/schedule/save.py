"""Writes an outcome to files: its schedule, its drawing, its trace. All of them are there whole, or none at all."""

import json
import os
from pathlib import Path

from shardwise.errors import ShardwiseError
from shardwise.schedule.outcome import Outcome
from shardwise.schedule.text import print_schedule
from shardwise.units import counted

_SUFFIXES = (".svg", ".json", ".schedule", ".txt", "")


def save(outcome: Outcome, paths: list[Path]) -> None:
    """Write one file for each path, in the form that its ending names."""
    written: list[tuple[Path, Path]] = []
    path = paths[0]
    try:
        for path in paths:
            _check(path)
        # Each is first written beside its place; when all have gone well, they are put there.
        for path in paths:
            beside = path.with_name(f".{len(written)}.{os.getpid()}.tmp")
            written.append((beside, path))
            beside.write_text(_text(outcome, path.suffix.lower()), encoding="utf-8")
        for beside, path in written:
            beside.replace(path)
    except OSError as error:
        raise ShardwiseError(
            f"{path} cannot be written: {error.strerror}", remedy="--save in a folder that may be written to"
        ) from None
    finally:
        for beside, _ in written:
            beside.unlink(missing_ok=True)


def _check(path: Path) -> None:
    """Refuse what cannot be written, before anything is."""
    if path.is_dir():
        raise ShardwiseError(
            f"{path} cannot be written: it is a folder", remedy=f"--save {path / 'schedule.svg'}, a file in it"
        )
    if not path.parent.is_dir():
        raise ShardwiseError(
            f"{path} cannot be written: there is no folder {path.parent}", remedy=f"mkdir -p {path.parent}"
        )
    if path.suffix.lower() not in _SUFFIXES:
        raise ShardwiseError(
            f"{path.name}: nothing is known to be saved as '{path.suffix}'",
            remedy=f"{path.stem}.svg, {path.stem}.json (for Perfetto) or {path.stem}.schedule",
        )


def _text(outcome: Outcome, suffix: str) -> str:
    schedule, question = outcome.schedule, outcome.question
    if suffix == ".svg":
        from shardwise.trace.svg import to_svg

        stages, microbatches = counted(question.num_ranks, "stage"), counted(question.num_microbatches, "microbatch")
        return to_svg(outcome.trace, title=f"{schedule.name}: {stages}, {microbatches}")
    if suffix == ".json":
        from shardwise.trace.perfetto import to_perfetto

        return json.dumps(to_perfetto(outcome.trace))
    return print_schedule(schedule)
