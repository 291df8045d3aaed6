"""What has been run on this machine's GPUs, kept from one call to the next: a call may end before all is done.

A record is of one state of the source, on one kind of GPU with one torch. What was recorded of another is run again.
Several processes write into one record: a result is one line at its end. A process that is killed as it writes leaves
half a line, which is not read.
"""

import hashlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardwise import environment

ROOT = Path(__file__).parents[2]
FILE = ROOT / "build" / "gpu_tests.jsonl"


class Record:
    """Results by name, written down as they come."""

    def __init__(self, path: Path = FILE, *, anew: bool = False, known: dict[str, Any] | None = None) -> None:
        """`known`: what results depend on, where another process has asked already."""
        self.path, self.about = path, about() if known is None else known
        self.rows: dict[str, dict[str, Any]] = {}
        if anew:
            path.unlink(missing_ok=True)
        self.read()

    def read(self) -> None:
        """What has been written down so far, also by others."""
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                found = json.loads(line)
            except ValueError:
                continue  # Half a line, of a process that was killed.
            if _without_day(found["about"]) == _without_day(self.about):
                self.rows[found["name"]] = found["row"]

    def add(self, name: str, row: dict[str, Any]) -> None:
        self.rows[name] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"name": name, "row": row, "about": self.about}) + "\n"
        if not self._ends_with_a_line():
            line = "\n" + line
        with self.path.open("ab", buffering=0) as file:
            file.write(line.encode())  # In one write: others write too.

    def _ends_with_a_line(self) -> bool:
        if not self.path.exists() or not self.path.stat().st_size:
            return True
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() == b"\n"

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The results whose names begin so, in the order in which they came."""
        return [row for name, row in self.rows.items() if name.startswith(f"{kind}: ")]


def about() -> dict[str, Any]:
    """What a result depends on."""
    import torch  # A process that is told does not need it.

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "source": _digest(),
        "device": torch.cuda.get_device_name() if gpus else environment.processor_name(),
        "gpus": gpus,
        "versions": environment.versions_of(["torch", "triton", "transformers"]),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else "",  # type: ignore[no-untyped-call]
        "date": datetime.now(UTC).date().isoformat(),
    }


def _without_day(about: dict[str, Any]) -> dict[str, Any]:
    """A run that goes on after midnight is the same run."""
    return {name: value for name, value in about.items() if name != "date"}


def _digest() -> str:
    """Of our own source and of these tests."""
    found = hashlib.sha256()
    for folder in ("src/shardwise", "tests/gpu", "tests/parity"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:16]
