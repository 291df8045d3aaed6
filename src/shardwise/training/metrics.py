"""What is noted of a run while it trains: `metrics.jsonl`, a row a line, and the same for TensorBoard if it is wanted.

A disk without room must not end a run: a row that cannot be written is left out whole, and told of.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.training.folder import METRICS, TENSORBOARD

Row = Mapping[str, Any]


class Metrics:
    """`metrics.jsonl`. A run that goes on keeps the rows of the steps before, and writes those after anew."""

    def __init__(self, path: Path, *, after: int) -> None:
        kept = [json.dumps(row) for row in _rows(path) if row["step"] <= after]
        beside = path.with_name(path.name + ".part")
        try:
            beside.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        except OSError as error:
            raise ShardwiseError(f"{path} cannot be written: {error.strerror}", remedy="room on its disk") from None
        beside.rename(path)
        # Not buffered: what could not be written must not be tried again beside the next row.
        self._file = path.open("ab", buffering=0)
        self._end = self._file.seek(0, 2)

    def add(self, row: Row) -> str | None:
        """Write a row. Returns what went wrong; then nothing of it is in the file."""
        # JSON has no word for what is not finite.
        plain = {
            key: None if isinstance(each, float) and not math.isfinite(each) else each for key, each in row.items()
        }
        left = memoryview((json.dumps(plain) + "\n").encode())
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._file.truncate(self._end)
            return f"the metrics of step {row['step']} cannot be written: {error.strerror}"
        self._end = self._file.tell()
        return None

    def close(self) -> None:
        self._file.close()


def _is_plain(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run."""
    return _rows(folder / METRICS)


def _rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            break  # A line that a kill cut short is the last.
        if not isinstance(row, dict) or "step" not in row:
            break
        rows.append(row)
    return rows


class Board:
    """The same rows as curves of TensorBoard. Those of steps that a run takes again after a restart are shown once."""

    def __init__(self, folder: Path, *, after: int) -> None:
        self._writer = _find_writer()(str(folder / TENSORBOARD), purge_step=after + 1 if after else None)

    def add(self, row: Row) -> None:
        for key, each in row.items():
            if key != "step" and isinstance(each, (int, float)):
                self._writer.add_scalar(key, each, row["step"])

    def close(self) -> None:
        self._writer.close()


def check_board() -> None:
    """Refuse to begin a run that wants TensorBoard where it is not installed."""
    _find_writer()


def _find_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ShardwiseError(
            "tensorboard=true, and TensorBoard is not installed", remedy="pip install 'shardwise[tensorboard]'"
        ) from None
    return SummaryWriter
