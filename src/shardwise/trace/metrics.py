"""The metrics of a run, step by step: `metrics.jsonl`, one row per line, and curves of them."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"

#: A metric as (step, value), in order. Steps without a finite value are left out.
Curve = tuple[tuple[int, float], ...]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run."""
    rows, path = list[dict[str, Any]](), folder / METRICS
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            break  # A line that was cut off by a kill is the last.
        if not isinstance(row, dict) or "step" not in row:
            break
        rows.append(row)
    return rows


def curves_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    """Return every numeric metric, by name, in the order of their first occurrence."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        step = row["step"]
        for key, value in row.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if key != "step" and is_number and isinstance(step, int):
                found.setdefault(key, {})[step] = float(value)
    return {key: tuple(sorted(values.items())) for key, values in found.items()}
