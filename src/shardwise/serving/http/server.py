"""The server's socket and shutdown: a free port, timeouts for silent connections, and signals."""

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from shardwise.errors import ShardwiseError

#: How long a connection may take to send the head of a request, however slowly it arrives.
_HEAD_SECONDS = 20.0
_BACKLOG = 2048


class PatientProtocol(H11Protocol):
    """uvicorn's protocol, which also closes a connection that does not send the head of a request in time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline: asyncio.TimerHandle | None = None
        self._arm()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None:
            self._disarm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def _arm(self) -> None:
        self._deadline = self.loop.call_later(_HEAD_SECONDS, self._end)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end(self) -> None:
        # The timer is cancelled once a head has arrived.
        self.transport.close()


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


def serve_app(app: ASGIApp, listening: socket.socket, *, ready: Callable[[], None]) -> None:
    """Serve until a signal arrives. `ready` is called when the first request can be answered."""
    _allow_many_connections()

    class _Serving(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            if self.started:
                ready()

    config = uvicorn.Config(
        app, http=PatientProtocol, ws="none", log_level="warning", access_log=False, lifespan="on",
        timeout_keep_alive=30, timeout_graceful_shutdown=5, backlog=_BACKLOG, server_header=False,
    )  # fmt: skip
    server: Any = _Serving(config)
    with suppress(KeyboardInterrupt):  # uvicorn raises the signal again after it has stopped.
        server.run(sockets=[listening])


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
