"""Write plain values as readable YAML. Every string that could be parsed as something else is quoted."""

import json
import re
from collections.abc import Mapping, Sequence

# Characters without a meaning in YAML, and no word that it parses as a boolean or null.
_PLAIN = re.compile(r"(?!(?:true|false|yes|no|on|off|null|y|n)$)[A-Za-z/][\w./-]*", re.IGNORECASE)


def to_yaml(documents: Sequence[Mapping[str, object]]) -> str:
    """Return several documents as one file."""
    return "---\n".join("\n".join(_lines(document)) + "\n" for document in documents)


def _lines(value: object) -> list[str]:
    if isinstance(value, Mapping) and value:
        return [line for key, item in value.items() for line in _entry(f"{_scalar(key)}:", item)]
    if isinstance(value, (list, tuple)) and value:
        return [line for item in value for line in _item(item)]
    return [_scalar(value)]


def _entry(key: str, item: object) -> list[str]:
    if isinstance(item, str) and _is_block(item):
        return [f"{key} |", *(f"  {line}" if line else "" for line in item.splitlines())]
    inner = _lines(item)
    if isinstance(item, Mapping) and item:
        return [key, *(f"  {line}" for line in inner)]
    if isinstance(item, (list, tuple)) and item:
        return [key, *inner]
    return [f"{key} {inner[0]}"]


def _item(item: object) -> list[str]:
    first, *rest = _lines(item)
    return [f"- {first}", *(f"  {line}" for line in rest)]


def _is_block(text: str) -> bool:
    """Whether a text can be a literal block: YAML treats spaces at the ends of lines specially."""
    lines = text.split("\n")
    return (
        len(lines) > 2
        and lines[-1] == ""
        and lines[-2] != ""
        and not lines[0].startswith((" ", "\t"))
        and lines[0] != ""
        and all(line == line.rstrip() and line.isprintable() for line in lines)
    )


def _scalar(value: object) -> str:
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=False)
    assert value is None or isinstance(value, (bool, int, float, list, tuple, Mapping)), f"{value!r} in a manifest"
    return json.dumps(value)
