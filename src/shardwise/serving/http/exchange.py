"""One exchange with a client: read its body within limits, send events, and release everything if it leaves."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from shardwise.serving.http.api_error import ApiError

T = TypeVar("T")
#: The largest body that is read. 8 MiB are about a million tokens as numbers.
MOST_BODY_BYTES = 8 << 20
#: The largest body that is received and dropped, so that its client can read why: one that is still sending when the
#: connection closes sees only that.
_MOST_DROPPED_BYTES = 128 << 20
#: How long a client may take to send its body, and to receive what was sent to it.
BODY_SECONDS = 30.0
TAKING_SECONDS = 60.0


class ClientLeftError(Exception):
    """The client has disconnected."""


async def read_json(request: HttpRequest) -> dict[str, Any]:
    """Read the body as a JSON object."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        # This also blocks other sites: a page cannot send this type without a CORS preflight, which is not allowed.
        raise ApiError(415, f"the body must be application/json, not {kind[:60]!r}", code="unsupported_media_type")
    if (packed := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise ApiError(415, f"the body is packed ({packed[:60]}); send it as it is", code="unsupported_media_type")
    try:
        raw = await asyncio.wait_for(_read(request), BODY_SECONDS)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s", code="timeout") from None
    try:
        body = json.loads(raw.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid UTF-8 at byte {error.start}", code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        said = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not valid JSON: {said[:200]}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return body


async def _read(request: HttpRequest) -> bytes:
    told = request.headers.get("content-length", "0")
    if told.isdecimal() and int(told[:20]) > _MOST_DROPPED_BYTES:
        raise _too_large()
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size > _MOST_DROPPED_BYTES:
            raise _too_large()
        if size > MOST_BODY_BYTES:
            parts.clear()
        else:
            parts.append(part)
    if size > MOST_BODY_BYTES:
        raise _too_large()
    return b"".join(parts)


def _too_large() -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {MOST_BODY_BYTES:,} bytes",
        code="body_too_large",
        headers={"Connection": "close"},
    )


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is not a number in JSON")


async def unless_it_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work while the client is connected. If it disconnects, the work is cancelled."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeftError
    finally:
        for task in (working, watching):
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """Server-sent events, written by `write`, which gets a function that sends one."""

    def __init__(self, write: Callable[[Callable[[str], Awaitable[None]]], Coroutine[Any, Any, None]]) -> None:
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's form
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]  # fmt: skip
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def event(data: str) -> None:
            body = f"data: {data}\n\n".encode()
            # A client that stops reading does not keep its connection for ever.
            async with asyncio.timeout(TAKING_SECONDS):
                await send({"type": "http.response.body", "body": body, "more_body": True})

        with suppress(ClientLeftError, OSError, TimeoutError):
            await unless_it_leaves(receive, self._write(event))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
