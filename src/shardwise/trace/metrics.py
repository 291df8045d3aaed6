"""The numbers of a run, step by step: `metrics.jsonl`, a row a line, and what of it can be drawn."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"

#: A metric as (step, value), first to last. A step that had no finite value is not among them.
Curve = tuple[tuple[int, float], ...]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run."""
    rows, path = list[dict[str, Any]](), folder / METRICS
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            break  # A line that a kill cut short is the last.
        if not isinstance(row, dict) or "step" not in row:
            break
        rows.append(row)
    return rows


def curves_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    """Every metric that has numbers, by name, in the order in which they first come."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        step = row["step"]
        for key, value in row.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if key != "step" and is_number and isinstance(step, int):
                found.setdefault(key, {})[step] = float(value)
    return {key: tuple(sorted(values.items())) for key, values in found.items()}
