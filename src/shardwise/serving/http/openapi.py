"""`/openapi.json`: the same schemas that requests are checked with."""

from typing import Any

from shardwise import environment
from shardwise.serving.http.fields import CHAT, COMPLETION

_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_REFUSALS = {
    "400": "what was asked for cannot be answered",
    "404": "no such model",
    "408": "the body came too slowly",
    "413": "the body is too large",
    "415": "the body is not valid JSON",
    "429": "too many wait already",
    "503": "the engine has failed, or the server is stopping",
}


def describe(*, needs_key: bool) -> dict[str, Any]:
    """Return the description of the API, in OpenAPI 3.1."""
    version = environment.versions_of(["shardwise"]).get("shardwise", "0")
    paths: dict[str, Any] = {
        "/health": {"get": _reads("whether the engine works", {"503": _said("it does not")})},
        "/v1/models": {"get": _reads("the model that is served")},
        "/v1/completions": {"post": _asks("continue texts, or tokens", COMPLETION)},
        "/v1/chat/completions": {"post": _asks("answer messages", CHAT)},
        "/metrics": {"get": _reads("figures for Prometheus", kind="text/plain")},
    }
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Shardwise", "version": version},
        "paths": paths,
        "components": {"schemas": {"Error": _ERROR}},
    }
    if needs_key:
        described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, methods in paths.items():
            for method in methods.values():
                if path != "/health":
                    method["security"] = [{"key": []}]
                    method["responses"]["401"] = _error("the key is missing or wrong")
    return described


def _reads(about: str, more: dict[str, Any] | None = None, kind: str = "application/json") -> dict[str, Any]:
    return {"summary": about, "responses": {"200": {"description": "it", "content": {kind: {}}}, **(more or {})}}


def _asks(about: str, schema: dict[str, Any]) -> dict[str, Any]:
    answer = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}}}
    return {
        "summary": about,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {"description": "what was written; with stream, as events", "content": answer},
            **{status: _error(said) for status, said in _REFUSALS.items()},
        },
    }


def _said(about: str) -> dict[str, Any]:
    return {"description": about, "content": {"application/json": {}}}


def _error(about: str) -> dict[str, Any]:
    return {
        "description": about,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
