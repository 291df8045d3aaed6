"""Function calls in a model's output. Three forms are common:

<tool_call>{"name": "f", "arguments": {...}}</tool_call>      Hermes, Qwen, and models without a form of their own
[TOOL_CALLS][{"name": "f", "arguments": {...}}]               Mistral; later models: [TOOL_CALLS]f[ARGS]{...}
{"name": "f", "parameters": {...}}                            Llama 3, whole, or after <|python_tag|>
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from shardwise.serving.text.tokenizer import Text

#: Openings of a call. A brace counts only as the first character of the output.
_OPENINGS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
_CLOSING = "</tool_call>"
#: Keywords of a schema whose values are values, and not schemas.
_VALUES = ("const", "enum", "default", "examples")
#: Keywords whose values are schemas by names of the user's, which may be those of keywords.
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
#: What is between the name and the arguments of a call in Mistral's later form.
_ARGUMENTS = re.compile(r"\s*([\w.:/-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")
#: Which of these a tokenizer may have as tokens that are no text.
_MARKS = (*_OPENINGS, _CLOSING, "[ARGS]", "[CALL_ID]")


def marks_of(text: Text) -> dict[int, str]:
    """Return the special tokens of a tokenizer that calls are written with."""
    return {token: name for token, name in text.special.items() if name in _MARKS}


class ToolCall(NamedTuple):
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCallStream:
    """Streams text: passes on what cannot be a call, and holds the rest until the end."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._held, self._is_call = frozenset(names), "", False
        self._has_shown = False

    def add(self, text: str) -> str:
        """Return what may be shown now."""
        self._held += text
        if self._is_call or not self._held:
            return ""
        if not self._has_shown and self._held.lstrip()[:1] in ("", "{"):
            return ""  # The whole answer may be a call.
        places = [place for opening in _OPENINGS if (place := self._held.find(opening)) >= 0]
        if places:
            self._is_call, cut = True, min(places)
        else:
            kept = max(_begun(self._held, opening) for opening in _OPENINGS)
            cut = len(self._held) - kept
        shown, self._held = self._held[:cut], self._held[cut:]
        self._has_shown = self._has_shown or bool(shown.strip())
        return shown

    def end(self) -> tuple[str, list[ToolCall]]:
        """Return the rest: text, or calls. A call of an unknown function stays text."""
        text, calls = find_calls(self._held, self._names)
        self._held = ""
        return text, calls


def find_calls(text: str, names: frozenset[str]) -> tuple[str, list[ToolCall]]:
    """Return the calls in a text, and the text without them; the unchanged text if any part is not a valid call."""
    rest, found = "", list[Any]()
    left = text
    try:
        while "<tool_call>" in left:
            before, _, after = left.partition("<tool_call>")
            body, _, left = after.partition(_CLOSING)
            rest += before
            found.append(json.loads(body))
        for opening in ("[TOOL_CALLS]", "<|python_tag|>"):
            while opening in left:
                before, _, after = left.partition(opening)
                named = _ARGUMENTS.match(after)
                after = after[0 if named is None else named.end() :].strip()
                value, end = json.JSONDecoder().raw_decode(after)
                if named is not None:
                    value = {"name": named[1], "arguments": value}
                found += value if isinstance(value, list) else [value]
                left = before + after[end:]
        if not found and left.strip().startswith("{"):
            found, left = [json.loads(left)], ""
        calls = [_call_of(value) for value in found]
    except (ValueError, KeyError, TypeError, RecursionError):
        return text, []
    if not calls or any(call.name not in names for call in calls):
        return text, []
    return (rest + left).strip(), calls


def call_schema(tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of one call of any of these functions, for an answer that must be a call."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": _moved(
                    tool["function"].get("parameters") or {"type": "object"},
                    f"{f'/anyOf/{place}' if len(tools) > 1 else ''}/properties/arguments",
                ),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for place, tool in enumerate(tools)
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _moved(schema: Any, to: str) -> Any:
    """Return a schema that has become a part of another, at this pointer: its references begin there."""
    if isinstance(schema, list):
        return [_moved(each, to) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, each in schema.items():
        if key == "$ref" and isinstance(each, str) and (each == "#" or each.startswith("#/")):
            found[key] = f"#{to}{each[1:]}"
        elif key in _BY_NAME and isinstance(each, dict):
            found[key] = {name: _moved(schema, to) for name, schema in each.items()}
        else:
            found[key] = each if key in _VALUES else _moved(each, to)
    return found


def _call_of(value: Any) -> ToolCall:
    arguments = value["arguments"] if "arguments" in value else value["parameters"]
    if not isinstance(value["name"], str):
        raise TypeError("a name is a text")
    return ToolCall(value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments))


def _begun(text: str, opening: str) -> int:
    return next((size for size in range(min(len(opening) - 1, len(text)), 0, -1) if text.endswith(opening[:size])), 0)
