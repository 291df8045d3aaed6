"""Errors in OpenAI's form: a status, and `{"error": {"message", "type", "param", "code"}}`."""

from collections.abc import Mapping
from typing import Any

from shardwise.errors import ShardwiseError

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error response to a client."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.code = status, code
        self.message, self.param = _as_text(message), None if param is None else _as_text(param)
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def _as_text(said: str) -> str:
    """Replace lone surrogates, which may be in quoted client text and cannot be sent."""
    return said.encode(errors="backslashreplace").decode()


def refused(error: ShardwiseError, *, param: str | None = None, code: str | None = None) -> ApiError:
    """Turn a refusal of the engine, a template or a grammar into a client error."""
    message = error.problem if error.remedy is None else f"{error.problem}; try: {error.remedy}"
    return ApiError(400, message, param=param, code=code)
