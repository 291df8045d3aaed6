"""Typed values from user input: a frozen dataclass from keys and values, and back to TOML.

An unknown key is an error that names the nearest known one. So is a value of the wrong type, with the expected type.
Nested tables are dataclasses too, and their keys are dotted: `optimizer.rate`.
"""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from shardwise.errors import ShardwiseError, nearest, unknown

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_EXAMPLES = {int: "4", float: "0.1", bool: "true", str: '"text"'}


class Leaf(NamedTuple):
    """The value of a key, its type, and the metadata of its `Annotated` type."""

    value: Any
    kind: Any
    mark: Any


def leaves(value: Any, prefix: str = "") -> dict[str, Leaf]:
    """Return every key, dotted, in the order of the fields."""
    found: dict[str, Leaf] = {}
    plain, marked = (get_type_hints(type(value), include_extras=extras) for extras in (False, True))
    for each in fields(value):
        key, inner, kind = f"{prefix}{each.name}", getattr(value, each.name), marked[each.name]
        if is_dataclass(inner):
            found |= leaves(inner, f"{key}.")
            continue
        # In an optional type, the metadata is on the inner type.
        marks = (mark for part in (kind, *get_args(kind)) for mark in getattr(part, "__metadata__", ()))
        found[key] = Leaf(inner, plain[each.name], next(marks, None))
    return found


def updated(value: Any, entries: Mapping[str, Any], *, source: str) -> Any:
    """Return the value with some keys changed. Text is converted to the key's type. `source` is for errors."""
    known = leaves(value)
    for key in entries:
        if key not in known:
            error = unknown("key", key, known)
            # Most often the last part is misspelt, or typed without its table.
            last = {name.rpartition(".")[2]: name for name in known}
            meant = error.remedy or last.get(nearest(key.rpartition(".")[2], last) or "")
            raise ShardwiseError(f"{error.problem} (in {source})", remedy=meant)
    changes = {key: read(key, given, known[key].kind, source=source) for key, given in entries.items()}
    return _replaced(value, changes)


def _replaced(value: Any, changes: Mapping[str, Any], prefix: str = "") -> Any:
    before = {each.name: getattr(value, each.name) for each in fields(value)}
    after = {
        name: _replaced(old, changes, f"{prefix}{name}.") if is_dataclass(old) else changes.get(f"{prefix}{name}", old)
        for name, old in before.items()
    }
    return replace(value, **after)


def read(key: str, given: Any, kind: Any, *, source: str) -> Any:
    """Return a value of type `kind`, from such a value or from text."""
    if get_origin(kind) is Literal:
        choices = [str(each) for each in get_args(kind)]
        if given not in choices:
            error = unknown(key, str(given), choices)
            raise ShardwiseError(f"{error.problem} (in {source})", remedy=error.remedy and f"{key}={error.remedy}")
        return given
    accepted = get_args(kind) or (kind,)
    if type(None) in accepted and given in (None, "none"):
        return None
    wanted = next(each for each in accepted if each is not type(None))
    made = _convert(given, wanted)
    if made is None:
        raise ShardwiseError(
            f"{key} in {source} wants {_WORDS[wanted]}, and is {given!r}", remedy=f"{key}={_EXAMPLES[wanted]}"
        )
    return made


def _convert(given: Any, wanted: type) -> Any:
    """Return the value as a `wanted`, or None if it cannot be converted."""
    if isinstance(given, bool) or wanted is bool:
        is_switch = isinstance(given, bool) or given in ("true", "false")
        return (given is True or given == "true") if wanted is bool and is_switch else None
    if wanted is str:
        return given if isinstance(given, str) else None
    if isinstance(given, str):
        try:
            given = int(given)
        except ValueError:
            try:
                given = float(given)
            except ValueError:
                return None
    if wanted is float:
        return float(given) if isinstance(given, (int, float)) else None
    if isinstance(given, float) and given.is_integer():
        given = int(given)
    return given if isinstance(given, int) else None


def dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one table with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def to_toml(value: Any) -> str:
    """Return the value as TOML: plain keys first, then a table for each nested dataclass. None is left out."""
    lines, table = list[str](), ""
    for key, leaf in sorted(leaves(value).items(), key=lambda item: item[0].count(".")):
        home, _, name = key.rpartition(".")
        if home != table:
            lines += ["", f"[{home}]"]
            table = home
        if leaf.value is not None:
            # Strings, numbers and booleans of JSON are valid TOML.
            lines.append(f"{name} = {json.dumps(leaf.value)}")
    return "\n".join(lines) + "\n"
