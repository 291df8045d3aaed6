"""Check values against the JSON schemas that `/openapi.json` publishes, with a sentence for what is wrong.

The tables in `fields.py` are the single source: they are checked here and published. Only the keywords that they use
are supported, and one of our own: `x-instead` is what to do instead of asking for a value that is not allowed.
"""

from typing import Any

from shardwise.errors import nearest
from shardwise.serving.http.api_error import ApiError

Schema = dict[str, Any]
_KINDS = {
    "string": "a string",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def or_null(schema: Schema) -> Schema:
    """Also allow null, which clients send for fields they leave open."""
    return {
        "anyOf": [schema, {"type": "null"}],
        **({"description": schema["description"]} if "description" in schema else {}),
    }


def number(low: float, high: float, about: str) -> Schema:
    return or_null({"type": "number", "minimum": low, "maximum": high, "description": about})


def whole(low: int, high: int, about: str) -> Schema:
    return or_null({"type": "integer", "minimum": low, "maximum": high, "description": about})


def text(about: str, most: int = 256) -> Schema:
    return or_null({"type": "string", "maxLength": most, "description": about})


def flag(about: str) -> Schema:
    return or_null({"type": "boolean", "description": about})


def check(value: Any, schema: Schema, *, at: str = "") -> None:
    """Raise an `ApiError` for the first violation of the schema."""
    if "x-instead" in schema:
        try:
            check(value, {key: each for key, each in schema.items() if key != "x-instead"}, at=at)
        except ApiError:
            raise _wrong(at, f"is {_shown(value)}: {schema['x-instead']}") from None
        return
    if "anyOf" in schema:
        _check_any(value, schema["anyOf"], at)
        return
    kind = schema.get("type")
    if kind is not None and not _is(value, kind):
        raise _wrong(at, f"wants {_KINDS[kind]}, not {_shown(value)}")
    if "enum" in schema and not any(
        value is each or (value == each and type(value) is type(each)) for each in schema["enum"]
    ):
        known = ", ".join(repr(each) for each in schema["enum"])
        raise _wrong(at, f"is {_shown(value)}; known: {known}")
    if kind in ("integer", "number"):
        _check_number(value, schema, at)
    elif kind == "string":
        _check_length(len(value), schema, at, "Length", "characters")
    elif kind == "array":
        _check_length(len(value), schema, at, "Items", "entries")
        if _are_plain_tokens(value, schema.get("items", {})):
            return
        for place, each in enumerate(value):
            check(each, schema.get("items", {}), at=f"{at}[{place}]")
    elif kind == "object":
        _check_object(value, schema, at)


def _are_plain_tokens(values: list[Any], schema: Schema) -> bool:
    """Whether all are integers in range: a fast path, because prompts have many."""
    if schema.get("type") != "integer" or not all(type(each) is int for each in values):
        return False
    return not values or (schema["minimum"] <= min(values) and max(values) <= schema["maximum"])


def _check_object(value: dict[str, Any], schema: Schema, at: str) -> None:
    properties = schema.get("properties", {})
    beyond = schema.get("additionalProperties", True)
    for name, each in value.items():
        here = f"{at}.{name}" if at else name
        if name in properties:
            check(each, properties[name], at=here)
        elif beyond is False:
            meant = nearest(name, properties)
            hint = f"; did you mean {meant!r}?" if meant else ""
            raise ApiError(
                400, f"unknown or unsupported field {here[:80]!r}{hint}", param=here[:80], code="unknown_field"
            )
        elif isinstance(beyond, dict):
            check(each, beyond, at=here)
    _check_length(len(value), schema, at, "Properties", "entries")
    for name in schema.get("required", ()):
        if name not in value:
            here = f"{at}.{name}" if at else name
            raise ApiError(400, f"the field {here!r} is missing", param=here, code="missing_field")


def _check_any(value: Any, schemas: list[Schema], at: str) -> None:
    """Require one of the schemas. If only one has the value's type, or its `const`, report that one's error."""
    errors = []
    for schema in schemas:
        try:
            check(value, schema, at=at)
        except ApiError as error:
            errors.append((schema, error))
        else:
            return
    alike = [error for schema, error in errors if _is(value, schema.get("type", "")) and _has_tag(value, schema)]
    alike = [error for schema, error in errors if error in alike and _fits_first(value, schema)] or alike
    if alike:
        # The schema that matched furthest is probably the one that was meant.
        raise max(alike, key=lambda error: (len(error.param or ""), error.param or ""))
    tags = [tag for schema in schemas for tag in _tags(schema) or ()] if isinstance(value, dict) else []
    if tags:
        check(value.get("type"), {"enum": tags}, at=f"{at}.type" if at else "type")
    kinds = list(dict.fromkeys(_KINDS[schema["type"]] for schema, _ in errors if "type" in schema))
    raise _wrong(at, f"wants {' or '.join(kinds)}, not {_shown(value)}")


def _fits_first(value: Any, schema: Schema) -> bool:
    """Whether a list's first entry has the type of the schema's entries, which tells one kind of list from another."""
    kind = schema.get("items", {}).get("type")
    return isinstance(value, list) and bool(value) and kind is not None and _is(value[0], kind)


def _has_tag(value: Any, schema: Schema) -> bool:
    """Whether an object's `type` field selects this schema."""
    tags = _tags(schema)
    return tags is None or not isinstance(value, dict) or value.get("type") in tags


def _tags(schema: Schema) -> list[Any] | None:
    """Return the values of an object's `type` field that select this schema; None if it has no such field."""
    found: list[Any] | None = schema.get("properties", {}).get("type", {}).get("enum")
    return found


def _check_number(value: float, schema: Schema, at: str) -> None:
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high = schema.get("maximum")
    # NaN is neither below nor above a limit, so it is checked separately.
    if value != value or (low is not None and value < low) or (above is not None and value <= above):
        least = f"at least {low}" if above is None else f"more than {above}"
        raise _wrong(at, f"is {_shown(value)}; it must be {least}")
    if high is not None and value > high:
        raise _wrong(at, f"is {_shown(value)}; it must be at most {high}")


def _check_length(length: int, schema: Schema, at: str, noun: str, what: str) -> None:
    low, high = schema.get(f"min{noun}"), schema.get(f"max{noun}")
    if low is not None and length < low:
        raise _wrong(at, f"has {length} {what}; it must have at least {low}")
    if high is not None and length > high:
        raise _wrong(at, f"has {length} {what}; it must have at most {high}")


def _is(value: Any, kind: str) -> bool:
    if kind == "integer":
        # JSON has one number type: 1.0 is an integer.
        return (isinstance(value, int) and not isinstance(value, bool)) or (
            isinstance(value, float) and value.is_integer()
        )
    if kind == "number":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    kinds = {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None)}
    return kind in kinds and isinstance(value, kinds[kind])


def _wrong(at: str, words: str) -> ApiError:
    return ApiError(400, f"{at or 'the body'} {words}", param=at or None, code="invalid_value")


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    shown = str(value).lower() if isinstance(value, bool) else "null" if value is None else repr(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."
