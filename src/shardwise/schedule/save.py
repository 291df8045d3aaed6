"""Writes an outcome to files: its schedule, its drawing, its trace. A file is there whole or not at all."""

import json
import os
from pathlib import Path

from shardwise.errors import ShardwiseError
from shardwise.schedule.outcome import Outcome
from shardwise.schedule.text import print_schedule

_SUFFIXES = (".svg", ".json", ".schedule", ".txt", "")


def save(outcome: Outcome, paths: list[Path]) -> None:
    """Write one file for each path, in the form that its ending names."""
    for path in paths:
        if path.suffix not in _SUFFIXES:
            raise ShardwiseError(
                f"{path.name}: nothing is known to be saved as '{path.suffix}'",
                remedy=f"{path.stem}.svg, {path.stem}.json (for Perfetto) or {path.stem}.schedule",
            )
    texts = [(path, _text(outcome, path.suffix)) for path in paths]
    for path, text in texts:
        _write(path, text)


def _text(outcome: Outcome, suffix: str) -> str:
    schedule, question = outcome.schedule, outcome.question
    if suffix == ".svg":
        from shardwise.trace.svg import to_svg

        title = f"{schedule.name}: {question.num_ranks} stages, {question.num_microbatches} microbatches"
        return to_svg(outcome.trace, title=title)
    if suffix == ".json":
        from shardwise.trace.perfetto import to_perfetto

        return json.dumps(to_perfetto(outcome.trace))
    return print_schedule(schedule)


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ShardwiseError(
            f"{path} cannot be written: {error.strerror}", remedy="a folder that exists and may be written to"
        ) from None
