"""A seeded fault: a small mistake that somebody could make, as a change of one place in one file of the library."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import ShardwiseError

FAULTS = Path(__file__).parent / "faults"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. `tests` are pytest's paths or node ids, run in this order until one fails."""

    id: str
    room: str
    #: One sentence: what the library does wrong then.
    wrong: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]

    def applied_to(self, source: str) -> str:
        """The source with the fault. The place must be the only one of its kind."""
        count = source.count(self.text)
        if count != 1:
            raise ShardwiseError(
                f"the text that the fault {self.id} replaces is in {self.file} {count} times, and must be there once",
                remedy=f"the text of {self.id} in {self.room}.toml as the file has it now",
            )
        return source.replace(self.text, self.replacement)


def read_faults(folder: Path = FAULTS) -> list[Fault]:
    """All faults, room by room. A room is a file of this folder."""
    found: dict[str, Fault] = {}
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]:
            fault = Fault(room=path.stem, **{**entry, "tests": tuple(entry["tests"])})
            if fault.id in found:
                raise ShardwiseError(f"there are two faults {fault.id}", remedy=f"another id in {path.name}")
            found[fault.id] = fault
    return list(found.values())
