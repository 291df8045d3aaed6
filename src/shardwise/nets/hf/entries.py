"""Read the entries of a `config.json`. A missing entry, or one of the wrong type, is an error that names it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import ShardwiseError

CONFIG = "config.json"


class Entries:
    """The entries, and their file. A null number or text counts as absent."""

    def __init__(self, entries: Mapping[str, Any], origin: str = CONFIG) -> None:
        self._entries, self.origin = entries, origin

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._get(key, default, "a whole number", int))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._get(key, default, "a number", int, float))

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false. Null is false whatever the default, as in transformers."""
        return bool(self._get(key, default and not self.has(key), "true or false", bool))

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._get(key, default, "text", str))

    def find(self, key: str) -> Any:
        """Return the entry unchanged, or None."""
        return self._entries.get(key)

    def has(self, key: str) -> bool:
        """Whether there is such an entry, be it null."""
        return key in self._entries

    def table(self, key: str) -> "Entries":
        """Return a nested table; empty if it is absent."""
        value = self.find(key)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(key, value, "a table")
        return Entries(value or {}, f"{key} of {self.origin}")

    def must_be(self, key: str, *allowed: Any) -> None:
        """Refuse a setting that would be computed wrongly. The first of `allowed` is the default if it is absent."""
        value = self.find(key)
        if value is not None and value not in allowed:
            raise ShardwiseError(
                f"{self.origin} has {key}={json.dumps(value)}, and only {' or '.join(json.dumps(a) for a in allowed)}"
                " is computed here",
                remedy="another checkpoint, or transformers' own module",
            )

    def _get(self, key: str, default: Any, words: str, *kinds: type) -> Any:
        """Return an entry of one of these types. A boolean does not count as a number, unlike in Python."""
        value = default if self.find(key) is None else self.find(key)
        if value is None:
            raise ShardwiseError(f"{self.origin} lacks {key}", remedy=f"add {key} to it, as transformers writes it")
        if type(value) not in kinds:
            raise self._wrong(key, value, words)
        return value

    def _wrong(self, key: str, value: Any, kind: str) -> ShardwiseError:
        return ShardwiseError(f"{self.origin} has {key}={json.dumps(value)}, which should be {kind}")


def read_entries(folder: Path) -> Entries:
    """Return the `config.json` of a folder."""
    path = folder / CONFIG
    if not path.is_file():
        raise ShardwiseError(
            f"{folder} has no {CONFIG}, so it is not a Hugging Face model",
            remedy="the folder that save_pretrained wrote, or a downloaded snapshot",
        )
    return Entries(read_table(path), str(path))


def read_table(path: Path) -> dict[str, Any]:
    """Return the entries of a JSON file of a model's folder."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ShardwiseError(f"{path} is not JSON: {error}", remedy="download it again") from None
    if not isinstance(entries, dict):
        raise ShardwiseError(f"{path} is not a table of entries", remedy="download it again")
    return entries
