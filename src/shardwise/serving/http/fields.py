"""The fields of the two endpoints as JSON schemas: used for checking, and published in `/openapi.json`."""

from typing import Any

from shardwise.serving.http.json_schema import Schema

MOST_CHOICES = 128
MOST_TOP_LOGPROBS = 20
_MOST_TOKENS = 1 << 31
_LARGEST_SEED = (1 << 63) - 1


def _or_null(schema: Schema) -> Schema:
    """Also allow null, which clients send for fields they leave open."""
    return {
        "anyOf": [schema, {"type": "null"}],
        **({"description": schema["description"]} if "description" in schema else {}),
    }


def _number(low: float, high: float, about: str) -> Schema:
    return _or_null({"type": "number", "minimum": low, "maximum": high, "description": about})


def _whole(low: int, high: int, about: str) -> Schema:
    return _or_null({"type": "integer", "minimum": low, "maximum": high, "description": about})


def _text(about: str, most: int = 256) -> Schema:
    return _or_null({"type": "string", "maxLength": most, "description": about})


def _flag(about: str) -> Schema:
    return _or_null({"type": "boolean", "description": about})


_TOKEN = {"type": "integer", "minimum": 0, "maximum": _MOST_TOKENS}
_STOP = {"type": "string", "minLength": 1, "maxLength": 256}
_JSON_OBJECT: Schema = {"type": "object"}

#: Fields that both endpoints have.
_BOTH: dict[str, Schema] = {
    "model": _text("the name that /v1/models gives; none: the model that is served"),
    "max_tokens": _whole(0, _MOST_TOKENS, "how many tokens are written at most"),
    "n": _whole(1, MOST_CHOICES, "how many answers to each prompt"),
    "stop": {
        "anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": 16}, {"type": "null"}],
        "description": "strings that end the answer, and are no part of it",
    },
    "stop_token_ids": _or_null({"type": "array", "items": _TOKEN, "maxItems": 64, "description": "tokens that end it"}),
    "ignore_eos": _flag("go on after the token that ends a text"),
    "min_tokens": _whole(0, _MOST_TOKENS, "how many tokens are written at least"),
    "seed": _whole(-_LARGEST_SEED - 1, _LARGEST_SEED, "gives the same tokens again, whatever else is computed"),
    "temperature": _number(0, 2, "0 takes the likeliest token"),
    "top_p": _or_null(
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1, "description": "tokens that are so likely together"}
    ),
    "top_k": _whole(-1, _MOST_TOKENS, "so many of the likeliest tokens; 0 or -1: all"),
    "min_p": _number(0, 1, "tokens at least so likely, as a part of the likeliest"),
    "presence_penalty": _number(-2, 2, "against tokens that have been written"),
    "frequency_penalty": _number(-2, 2, "against tokens, by how often they have been written"),
    "repetition_penalty": _or_null(
        {"type": "number", "exclusiveMinimum": 0, "maximum": 10, "description": "against tokens seen; 1: none"}
    ),
    "logit_bias": _or_null(
        {
            "type": "object",
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": 1024,
            "description": "added to the logits of tokens, by their number",
        }
    ),
    "stream": _flag("send what is written as it is written"),
    "stream_options": _or_null(
        {
            "type": "object",
            "properties": {
                "include_usage": _flag("a last event with the usage"),
                "continuous_usage_stats": _flag("the usage so far in every event"),
            },
            "additionalProperties": False,
        }
    ),
    "priority": _whole(-(1 << 31), 1 << 31, "lower comes first"),
    "cache_salt": _text("beginnings are shared among requests with the same"),
    "return_token_ids": _flag("give the tokens of prompt and answer too"),
    "user": _text("who asks: under overload all who ask have their turn"),
}  # fmt: skip

COMPLETION: Schema = {
    "type": "object",
    "properties": {
        "prompt": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MOST_CHOICES},
                {"type": "array", "items": _TOKEN, "minItems": 1},
                {
                    "type": "array",
                    "items": {"type": "array", "items": _TOKEN, "minItems": 1},
                    "minItems": 1,
                    "maxItems": MOST_CHOICES,
                },
            ],
            "description": "a text, several, the tokens of one, or of several",
        },
        "echo": _flag("give the prompt back before the answer"),
        "logprobs": _whole(0, MOST_TOP_LOGPROBS, "log-probabilities of the tokens, and of so many of the likeliest"),
        **_BOTH,
    },
    "required": ["prompt"],
    "additionalProperties": False,
}

_PART: Schema = {
    "type": "object",
    "properties": {"type": {"type": "string", "enum": ["text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CALL: Schema = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "maxLength": 256},
        "type": {"type": "string", "enum": ["function"]},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        },
    },
    "required": ["id", "type", "function"],
    "additionalProperties": False,
}
_MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]},
        "name": _text("who speaks"),
        "tool_calls": _or_null({"type": "array", "items": _CALL, "maxItems": 128}),
        "tool_call_id": _text("which call this answers"),
        "refusal": _text("as it was answered", 1 << 20),
    },
    "required": ["role"],
    "additionalProperties": False,
}
_NAMED_SCHEMA: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 64},
        "description": _text("what it is for", 4096),
        "schema": _JSON_OBJECT,
        "strict": _flag("always so here"),
    },
    "required": ["name", "schema"],
    "additionalProperties": False,
}
_TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["function"]},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 64},
                "description": _text("what it does", 16384),
                "parameters": _or_null(_JSON_OBJECT),
                "strict": _flag("arguments follow the schema when a call is required"),
            },
            "required": ["name"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "function"],
    "additionalProperties": False,
}


def _of_type(name: str, **more: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {"type": {"type": "string", "enum": [name]}, **more},
        "required": ["type", *more],
        "additionalProperties": False,
    }


CHAT: Schema = {
    "type": "object",
    "properties": {
        "messages": {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": 4096},
        "max_completion_tokens": _whole(1, _MOST_TOKENS, "how many tokens are written at most"),
        "logprobs": _flag("log-probabilities of the tokens"),
        "top_logprobs": _whole(0, MOST_TOP_LOGPROBS, "and of so many of the likeliest"),
        "response_format": {
            "anyOf": [
                _of_type("text"), _of_type("json_object"), _of_type("json_schema", json_schema=_NAMED_SCHEMA),
                {"type": "null"},
            ],
            "description": "what the answer has to be",
        },
        "tools": _or_null({"type": "array", "items": _TOOL, "maxItems": 128, "description": "functions to call"}),
        "tool_choice": {
            "anyOf": [
                {"type": "string", "enum": ["none", "auto", "required"]},
                _of_type(
                    "function",
                    function={
                        "type": "object",
                        "properties": {"name": {"type": "string"}},
                        "required": ["name"],
                        "additionalProperties": False,
                    },
                ),
                {"type": "null"},
            ],
            "description": "whether a function is called, and which",
        },
        "parallel_tool_calls": _flag("whether several functions may be called at once"),
        **_BOTH,
    },
    "required": ["messages"],
    "additionalProperties": False,
}  # fmt: skip


def without_nulls(body: dict[str, Any]) -> dict[str, Any]:
    """Remove null fields, which mean the same as missing ones."""
    return {name: value for name, value in body.items() if value is not None}
