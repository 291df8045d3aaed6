"""Calls of functions in what a model has written. Three forms are common:

<tool_call>{"name": "f", "arguments": {...}}</tool_call>      Hermes, Qwen, and models that know of none
[TOOL_CALLS][{"name": "f", "arguments": {...}}]               Mistral
{"name": "f", "parameters": {...}}                            Llama 3, whole, or after <|python_tag|>
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

#: What begins a call. The brace counts only where it is the first thing that was written.
_OPENINGS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
_CLOSING = "</tool_call>"


class ToolCall(NamedTuple):
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCallStream:
    """Text as it comes: what is plainly no call is given on, the rest is kept for the end."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._held, self._is_call = frozenset(names), "", False
        self._has_shown = False

    def add(self, text: str) -> str:
        """What may be shown now."""
        self._held += text
        if self._is_call or not self._held:
            return ""
        if not self._has_shown and self._held.lstrip()[:1] in ("", "{"):
            return ""  # Perhaps a call that is all of the answer.
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
        """The rest: text, or calls. What is no call of a function that there is stays text."""
        text, calls = find_calls(self._held, self._names)
        self._held = ""
        return text, calls


def find_calls(text: str, names: frozenset[str]) -> tuple[str, list[ToolCall]]:
    """The calls in a text, and the text without them; the text as it is if any of it is no call that can be made."""
    rest, found = "", list[Any]()
    left = text
    try:
        while "<tool_call>" in left:
            before, _, after = left.partition("<tool_call>")
            body, _, left = after.partition(_CLOSING)
            rest += before
            found.append(json.loads(body))
        for opening in ("[TOOL_CALLS]", "<|python_tag|>"):
            if opening in left:
                before, _, after = left.partition(opening)
                value, end = json.JSONDecoder().raw_decode(after.strip())
                found += value if isinstance(value, list) else [value]
                left = before + after.strip()[end:]
        if not found and left.strip().startswith("{"):
            found, left = [json.loads(left)], ""
        calls = [_call_of(value) for value in found]
    except (ValueError, KeyError, TypeError, RecursionError):
        return text, []
    if not calls or any(call.name not in names for call in calls):
        return text, []
    return (rest + left).strip(), calls


def call_schema(tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The schema of one call of any of these functions, for an answer that must be one."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": tool["function"].get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _call_of(value: Any) -> ToolCall:
    arguments = value["arguments"] if "arguments" in value else value["parameters"]
    if not isinstance(value["name"], str):
        raise TypeError("a name is a text")
    return ToolCall(value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments))


def _begun(text: str, opening: str) -> int:
    return next((size for size in range(min(len(opening) - 1, len(text)), 0, -1) if text.endswith(opening[:size])), 0)
