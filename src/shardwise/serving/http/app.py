"""The routes: OpenAI's endpoints, health, metrics, the API description, and the page.

Authorisation comes before anything else. Every error is returned in OpenAI's form.
"""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from shardwise.errors import ShardwiseError
from shardwise.serving.http.answers import AnswerForm, make_form
from shardwise.serving.http.api_error import ApiError, refused
from shardwise.serving.http.asked import Asked, Served, asked_for_chat, asked_for_completion
from shardwise.serving.http.engine_loop import EngineFailedError, EngineLoop, OverloadedError, Ticket
from shardwise.serving.http.exchange import ClientLeftError, EventStream, read_json, unless_it_leaves
from shardwise.serving.http.fields import CHAT, COMPLETION
from shardwise.serving.http.json_schema import check
from shardwise.serving.http.live import LiveView
from shardwise.serving.http.metrics import make_metrics
from shardwise.serving.http.openapi import describe
from shardwise.serving.http.page import make_page
from shardwise.serving.http.server import is_loopback
from shardwise.serving.http.written import Written
from shardwise.serving.request import Answering

_LOG = logging.getLogger("shardwise.serving")
#: Paths that need no key: whether it is up, the API description, and the page, which asks for the key itself.
_OPEN_PATHS = ("/health", "/openapi.json", "/")
_ANSWERED_PATHS = ("/v1/completions", "/v1/chat/completions")
#: Longer texts are tokenised in a thread, because the event loop serves all requests.
_LONG_BYTES = 20_000


class Server:
    """State that the routes share. Clients must send `key`; without one, only clients of this machine may ask."""

    def __init__(self, engine: Answering, served: Served, *, key: str | None = None, most_waiting: int = 256) -> None:
        self.served, self._key, self._created = served, key, int(time.time())
        self.metrics = make_metrics(served.name)
        self.live = LiveView()
        self.loop = EngineLoop(engine, most_waiting=most_waiting, watch=self._stepped)
        self.metrics.watch(self.loop)
        self.num_answered = 0

    def app(self) -> ASGIApp:
        routes = [
            Route("/", self._page),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/live", self._live),
            Route("/openapi.json", self._openapi),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/v1/completions", self._answer(COMPLETION, asked_for_completion, is_chat=False), methods=["POST"]),
            Route("/v1/chat/completions", self._answer(CHAT, asked_for_chat, is_chat=True), methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {ApiError: self._tell_error, HTTPException: _tell_http_error}
        app = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)
        return _Guard(app, self._look_at)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:  # noqa: ARG002 - Starlette's form
        self.loop.start()
        try:
            yield
        finally:
            await self.loop.close()

    def _stepped(self, num_tokens: int) -> None:
        self.metrics.stepped(num_tokens)
        self.live.add(num_tokens)

    def _look_at(self, request: HttpRequest) -> None:
        """Refuse unauthorised requests, and generation requests if the queue is full, at almost no cost."""
        self._check_allowed(request)
        if request.method == "POST" and request.scope["path"] in _ANSWERED_PATHS:
            try:
                self.loop.check_room()
            except OverloadedError as error:
                self.metrics.refused(429)
                raise _as_api_error(error) from None

    def _check_allowed(self, request: HttpRequest) -> None:
        if self._key is None:
            host = request.headers.get("host", "localhost")
            name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
            if not is_loopback(name.lower().removeprefix("[").removesuffix("]")):
                # DNS rebinding: a page of another site may have its own name resolve to this machine.
                raise ApiError(
                    403, f"asked for as {host[:80]!r}; without an API key only 127.0.0.1 and localhost answer"
                )
        elif request.scope["path"] not in _OPEN_PATHS:
            kind, _, shown = request.headers.get("authorization", "").partition(" ")
            # Headers are bytes, decoded as Latin-1 whatever they were.
            if kind.lower() != "bearer" or not hmac.compare_digest(shown.encode("latin-1").strip(), self._key.encode()):
                raise ApiError(
                    401, "the API key is missing or wrong", code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )  # fmt: skip

    async def _tell_error(self, request: HttpRequest, error: ApiError) -> Response:  # noqa: ARG002 - Starlette's form
        self.metrics.refused(error.status)
        return told(error)

    # Routes that show something.

    async def _page(self, request: HttpRequest) -> Response:  # noqa: ARG002
        return HTMLResponse(make_page(self.served.name, needs_key=self._key is not None))

    async def _health(self, request: HttpRequest) -> Response:  # noqa: ARG002
        failure, trouble = self.loop.failure, self.loop.load.trouble
        status = "failed" if failure is not None else "ok" if trouble is None else "partly"
        reason = failure or trouble
        body = {"status": status, "model": self.served.name, **({} if reason is None else {"reason": reason})}
        return JSONResponse(body, 200 if failure is None else 503)

    async def _metrics(self, request: HttpRequest) -> Response:  # noqa: ARG002
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _live(self, request: HttpRequest) -> Response:  # noqa: ARG002
        return JSONResponse(self.live.shown(self.loop))

    async def _openapi(self, request: HttpRequest) -> Response:  # noqa: ARG002
        return JSONResponse(describe(needs_key=self._key is not None))

    async def _models(self, request: HttpRequest) -> Response:  # noqa: ARG002
        return JSONResponse({"object": "list", "data": [self._about()]})

    async def _model(self, request: HttpRequest) -> Response:
        if request.path_params["name"] != self.served.name:
            raise ApiError(404, f"there is no such model here; known: {self.served.name}", code="model_not_found")
        return JSONResponse(self._about())

    def _about(self) -> dict[str, Any]:
        return {
            "id": self.served.name, "object": "model", "created": self._created, "owned_by": "shardwise",
            "max_model_len": self.served.max_length,
            "vocabulary_size": self.served.vocabulary_size,
        }  # fmt: skip

    # Routes that generate.

    def _answer(
        self, schema: dict[str, Any], make: Callable[..., Asked], *, is_chat: bool
    ) -> Callable[[HttpRequest], Awaitable[Response | EventStream]]:
        async def answer(request: HttpRequest) -> Response | EventStream:
            try:
                body = await read_json(request)
                client = request.client.host if request.client else ""
                check(body, schema)
                is_long = int(request.headers.get("content-length", "0")) > _LONG_BYTES
                asked = (
                    await asyncio.to_thread(make, body, self.served, client=client)
                    if is_long
                    else make(body, self.served, client=client)
                )
                return await self._begin(request, make_form(is_chat, asked, self.served))
            except RecursionError:  # Of a body that could just be read.
                raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
            except (ClientDisconnect, ClientLeftError):
                return Response(status_code=499)  # The client has left.

        return answer

    async def _begin(self, request: HttpRequest, form: AnswerForm) -> Response | EventStream:
        if form.asked.schema is None:
            requests = form.asked.requests(form.id, self.served.grammars)
        else:  # Compiling a schema is slow, and the first one needs the whole vocabulary: do not block others.
            requests = await asyncio.to_thread(form.asked.requests, form.id, self.served.grammars)
        with _as_api_errors():
            tickets = self.loop.ask(requests, client=form.asked.client)
        answering = Answered(self, form, tickets)
        if not form.asked.is_streamed:
            try:
                with _as_api_errors():
                    await unless_it_leaves(request.receive, answering.all())
            finally:
                self.loop.cancel(tickets)
            return JSONResponse(form.whole(answering.written))
        try:
            # Errors before the first token are returned with their status, before the stream begins.
            with _as_api_errors():
                await unless_it_leaves(request.receive, answering.first())
        except BaseException:
            self.loop.cancel(tickets)
            raise
        return EventStream(answering.write)


class Answered:
    """The sequences of one request, and their text so far."""

    def __init__(self, server: Server, form: AnswerForm, tickets: Sequence[Ticket]) -> None:
        self._server, self._form, self._tickets = server, form, tickets
        self.written = [Written(server.served.text, form.asked, ticket.request) for ticket in tickets]
        self._last: list[float | None] = [None] * len(tickets)
        self._early: tuple[int, Any] | None = None

    async def all(self) -> None:
        """Run all sequences to their end."""
        await asyncio.gather(*(self._finish(place) for place in range(len(self._tickets))))

    async def _finish(self, place: int) -> None:
        while self.written[place].finish is None:
            await self._next(place)

    async def first(self) -> None:
        """Wait until the first sequence has output, or an error is raised."""
        self._early = (0, await self._next(0))

    async def _next(self, place: int) -> Any:
        ticket, written = self._tickets[place], self.written[place]
        piece = written.add(await ticket.news())
        now, last = time.monotonic(), self._last[place]
        if piece.tokens and last is None:
            self._server.metrics.first_token(ticket)
        elif piece.tokens and last is not None:
            for _ in piece.tokens:
                self._server.metrics.next_token((now - last) / len(piece.tokens))
        if piece.tokens:
            self._last[place] = now
        if written.finish is not None:
            self._server.loop.cancel([ticket])
            self._server.metrics.finished(now - ticket.asked_at, written.finish)
            self._server.num_answered += 1
        return piece

    async def write(self, event: Callable[[str], Awaitable[None]]) -> None:
        """Write everything as events, as it arrives; a later error is an event too."""
        try:
            streams = [asyncio.ensure_future(self._stream(place, event)) for place in range(len(self._tickets))]
            try:
                await asyncio.gather(*streams)
            finally:
                for stream in streams:
                    stream.cancel()
            if self._form.asked.has_usage_event:
                await event(_line(self._form.usage_event(self.written)))
            await event("[DONE]")
        except (EngineFailedError, OverloadedError, ShardwiseError) as error:
            await event(_line(_as_api_error(error).body()))
        finally:
            self._server.loop.cancel(self._tickets)

    async def _stream(self, place: int, event: Callable[[str], Awaitable[None]]) -> None:
        written, is_first = self.written[place], True
        while True:
            if self._early is not None and self._early[0] == place:
                piece, self._early = self._early[1], None
            else:
                piece = await self._next(place)
            if is_first or piece.text or piece.calls or piece.finish or (piece.tokens and self._wants_tokens()):
                told = self._form.event(place, piece, written, is_first=is_first)
                await event(_line(self._form.with_usage(told, self.written)))
                is_first = False
            if piece.finish is not None:
                return

    def _wants_tokens(self) -> bool:
        return self._form.asked.return_token_ids or self._form.asked.sampling.logprobs is not None


class _as_api_errors:  # noqa: N801 - reads as a verb where it is used
    """Turns errors of the engine's loop inside it into `ApiError`s."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        if isinstance(error, (EngineFailedError, OverloadedError, ShardwiseError)):
            raise _as_api_error(error) from None


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ShardwiseError):
        return refused(error)
    if isinstance(error, OverloadedError):
        headers = {"Retry-After": str(error.seconds)}
        return ApiError(429, f"too many requests: {error}", code="overloaded", headers=headers)
    return ApiError(503, str(error), code="engine_failed", headers={"Retry-After": "2"})


def told(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, headers=error.headers)


async def _tell_http_error(request: HttpRequest, error: HTTPException) -> Response:
    words = {404: f"there is nothing at {request.scope['path'][:80]}", 405: f"{request.method} is not for this path"}
    said = ApiError(error.status_code, words.get(error.status_code, error.detail), headers=dict(error.headers or {}))
    return told(said)


def _line(data: dict[str, Any]) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


class _Guard:
    """Refuses unauthorised requests before anything else; an unexpected exception becomes a 500 that says so."""

    def __init__(self, app: ASGIApp, look: Callable[[HttpRequest], None]) -> None:
        self._app, self._look = app, look

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._look(HttpRequest(scope))
        except ApiError as error:
            await told(error)(scope, receive, send)
            return
        has_begun = False

        async def noting(message: Any) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception:
            _LOG.exception("a request was not answered")
            if not has_begun:
                await told(ApiError(500, "a mistake of the server's; its log has more"))(scope, receive, send)
