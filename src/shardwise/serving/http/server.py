"""The server's socket and shutdown: a free port, timeouts for silent connections, and signals."""

import asyncio
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from shardwise.errors import ShardwiseError
from shardwise.serving.http.api_error import ApiError

#: How long a connection may take to send the head of a request, however slowly it arrives.
_HEAD_SECONDS = 20.0
_BACKLOG = 2048
#: How long requests may go on once the server is to stop, and clients may take to receive their last words.
_GRACE_SECONDS, _TAKING_SECONDS = 5.0, 1.0


class PatientProtocol(H11Protocol):
    """uvicorn's protocol, which also closes a connection that does not send the head of a request in time.

    What is not HTTP is answered in OpenAI's form, like every other mistake.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline: asyncio.TimerHandle | None = None
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's form
        """Say what is wrong, if nothing has been answered yet, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = ApiError(400, "the request is not valid HTTP/1.1", code="invalid_http")
            body = json.dumps(error.body()).encode()
            headers = [
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
            ]
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()

    def _watch_head(self) -> None:
        """Time a head from its first byte; the first one of a connection from the connection on."""
        is_first = self.cycle is None  # In spite of the type that uvicorn gives it.
        is_begun = is_first or bool(self.conn.trailing_data[0])
        if self.conn.their_state is not h11.IDLE or not is_begun:
            self._disarm()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(_HEAD_SECONDS, self.transport.close)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def check_address(host: str, key: str | None) -> None:
    """Refuse to listen beyond this machine without a key."""
    if key is not None or is_loopback(host):
        return
    raise ShardwiseError(
        f"--host {host} can be reached from other machines, and there is no API key",
        remedy="--api-key KEY, or --host 127.0.0.1",
    )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def open_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket. Port 0 takes a free one."""
    if not 0 <= port < 1 << 16:
        raise ShardwiseError(f"--port {port}: ports are from 0 to 65535", remedy="--port 0 takes a free one")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(_BACKLOG)
    except (OSError, UnicodeError) as error:
        made.close()
        why = getattr(error, "strerror", None) or str(error)
        raise ShardwiseError(
            f"{host}:{port} cannot be listened on: {why}",
            # Port 0 is always free: the address is what is wrong.
            remedy="--port 0 takes a free one" if port else "--host 127.0.0.1, or an address of this machine",
        ) from None
    return made


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Serving(uvicorn.Server):
    """uvicorn's server, over an app whose requests `drain` ends: by themselves within some seconds, or by an error."""

    def __init__(
        self, app: ASGIApp, *, drain: Callable[[float], Awaitable[None]], ready: Callable[[], None] = lambda: None,
        grace_seconds: float = _GRACE_SECONDS,
    ) -> None:  # fmt: skip
        super().__init__(
            uvicorn.Config(
                app, http=PatientProtocol, ws="none", log_level="error", access_log=False, lifespan="on",
                timeout_keep_alive=30, backlog=_BACKLOG, server_header=False,
            )
        )  # fmt: skip
        self._drain, self._ready, self._grace_seconds = drain, ready, grace_seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at the first signal. At the second, requests get no more time; uvicorn would end without the app."""
        if self.should_exit:
            self._loop.call_soon_threadsafe(self._hurry)
        else:
            super().handle_exit(sig, frame)

    def _hurry(self) -> None:
        self._hurrying = asyncio.ensure_future(self._drain(0.0))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop to listen at once, and end once all clients have their answers or errors."""
        ending = asyncio.ensure_future(self._end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_requests(self) -> None:
        await self._drain(self._grace_seconds)
        await asyncio.sleep(_TAKING_SECONDS)
        connections: Any = self.server_state.connections
        for connection in list(connections):  # Clients that do not read, or are still sending.
            connection.transport.abort()


def serve_app(
    app: ASGIApp, listening: socket.socket, *, drain: Callable[[float], Awaitable[None]], ready: Callable[[], None]
) -> None:
    """Serve until a signal arrives. `ready` is called when the first request can be answered."""
    _allow_many_connections()
    with suppress(KeyboardInterrupt):  # uvicorn raises the signal again after it has stopped.
        Serving(app, drain=drain, ready=ready).run(sockets=[listening])


def _allow_many_connections() -> None:
    """Raise the limit of open files to the system's maximum, because every connection is a file."""
    try:
        import resource
    except ImportError:  # Windows.
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 20), hard))
