"""The fields of the two endpoints as JSON schemas: used for checking, and published in `/openapi.json`."""

from typing import Any

from shardwise.serving.http.fields_of_others import (
    BOTH_TAKE,
    CHAT_TAKES,
    COMPLETION_TAKES,
    MESSAGE_TAKES,
    STREAM_TAKES,
)  # fmt: skip
from shardwise.serving.http.json_schema import Schema, flag, number, or_null, text, whole

MOST_CHOICES = 128
MOST_TOP_LOGPROBS = 20
_MOST_TOKENS = 1 << 31
_LARGEST_SEED = (1 << 63) - 1

_TOKEN = {"type": "integer", "minimum": 0, "maximum": _MOST_TOKENS}
_STOP = {"type": "string", "minLength": 1, "maxLength": 256}
_JSON_OBJECT: Schema = {"type": "object"}

#: Fields that both endpoints have.
_BOTH: dict[str, Schema] = {
    "model": text("the name that /v1/models gives; none: the model that is served"),
    "max_tokens": whole(0, _MOST_TOKENS, "how many tokens are written at most"),
    "n": whole(1, MOST_CHOICES, "how many answers to each prompt"),
    "stop": {
        "anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": 16}, {"type": "null"}],
        "description": "strings that end the answer, and are no part of it",
    },
    "stop_token_ids": or_null({"type": "array", "items": _TOKEN, "maxItems": 64, "description": "tokens that end it"}),
    "ignore_eos": flag("go on after the token that ends a text"),
    "min_tokens": whole(0, _MOST_TOKENS, "how many tokens are written at least; a stop string within them is text"),
    "seed": whole(-_LARGEST_SEED - 1, _LARGEST_SEED, "gives the same tokens again, whatever else is computed"),
    "temperature": number(0, 2, "0 takes the likeliest token"),
    "top_p": or_null(
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1, "description": "tokens that are so likely together"}
    ),
    "top_k": whole(-1, _MOST_TOKENS, "so many of the likeliest tokens; 0 or -1: all"),
    "min_p": number(0, 1, "tokens at least so likely, as a part of the likeliest"),
    "presence_penalty": number(-2, 2, "against tokens that have been written"),
    "frequency_penalty": number(-2, 2, "against tokens, by how often they have been written"),
    "repetition_penalty": or_null(
        {"type": "number", "minimum": 0.01, "maximum": 10, "description": "against tokens seen; 1: none"}
    ),
    "logit_bias": or_null(
        {
            "type": "object",
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": 1024,
            "description": "added to the logits of tokens, by their number",
        }
    ),
    "stream": flag("send what is written as it is written"),
    "stream_options": or_null(
        {
            "type": "object",
            "properties": {
                "include_usage": flag("a last event with the usage"),
                "continuous_usage_stats": flag("the usage so far in every event"),
                **STREAM_TAKES,
            },
            "additionalProperties": False,
        }
    ),
    "priority": whole(-(1 << 31), 1 << 31, "lower comes first"),
    "cache_salt": text("beginnings are shared among requests with the same"),
    "return_token_ids": flag("give the tokens of prompt and answer too"),
    "user": text("who asks: under overload all who ask have their turn"),
    "safety_identifier": text("the same as `user`, by OpenAI's newer name"),
    **BOTH_TAKE,
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
        "echo": flag("give the prompt back before the answer"),
        "logprobs": whole(0, MOST_TOP_LOGPROBS, "log-probabilities of the tokens, and of so many of the likeliest"),
        "best_of": whole(1, MOST_CHOICES, "the same as n: every answer is given, and none is chosen"),
        **COMPLETION_TAKES,
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
        "index": whole(0, _MOST_TOKENS, "its place, as events of a stream have it"),
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
        "name": text("who speaks"),
        "tool_calls": or_null({"type": "array", "items": _CALL, "maxItems": 128}),
        "tool_call_id": text("which call this answers"),
        "refusal": text("as it was answered", 1 << 20),
        "reasoning_content": text("thoughts before an answer, for templates that write them again", 1 << 20),
        **MESSAGE_TAKES,
    },
    "required": ["role"],
    "additionalProperties": False,
}
_NAMED_SCHEMA: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 64},
        "description": text("what it is for", 4096),
        "schema": _JSON_OBJECT,
        "strict": flag("always so here"),
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
                "description": text("what it does", 16384),
                "parameters": or_null(_JSON_OBJECT),
                "strict": flag("arguments follow the schema when a call is required"),
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
        "max_completion_tokens": whole(1, _MOST_TOKENS, "how many tokens are written at most"),
        "logprobs": flag("log-probabilities of the tokens"),
        "top_logprobs": whole(0, MOST_TOP_LOGPROBS, "and of so many of the likeliest"),
        "response_format": {
            "anyOf": [
                _of_type("text"), _of_type("json_object"), _of_type("json_schema", json_schema=_NAMED_SCHEMA),
                {"type": "null"},
            ],
            "description": "what the answer has to be",
        },
        "tools": or_null({"type": "array", "items": _TOOL, "maxItems": 128, "description": "functions to call"}),
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
        "parallel_tool_calls": flag("whether several functions may be called at once"),
        "chat_template_kwargs": or_null(
            {"type": "object", "maxProperties": 64, "description": "variables of the model's chat template"}
        ),
        **CHAT_TAKES,
        **_BOTH,
    },
    "required": ["messages"],
    "additionalProperties": False,
}  # fmt: skip


def without_nulls(body: dict[str, Any]) -> dict[str, Any]:
    """Remove null fields, which mean the same as missing ones."""
    return {name: value for name, value in body.items() if value is not None}
