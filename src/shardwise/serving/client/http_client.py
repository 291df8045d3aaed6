"""One HTTP/1.1 request, with a whole answer or a stream of events, using asyncio only.

A benchmark must know when each event arrived, over hundreds of connections at once, and needs nothing else.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from shardwise.errors import ShardwiseError

#: The status of an answer that is none.
_NO_ANSWER = 0


class HttpStatusError(Exception):
    """The server answered, but not with 200. `code` and `param` are OpenAI's, where it gives them."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(f"{status}: {message}")
        self.status, self.message, self.code, self.param = status, message, code, param

    def told(self) -> ShardwiseError:
        """Return it as an error of the user's command."""
        remedy = "the address of a server with OpenAI's API"
        if self.status == _NO_ANSWER:
            return ShardwiseError(self.message, remedy=remedy)
        if self.status in (401, 403):
            remedy = "--api-key KEY"
        elif self.code == "context_length_exceeded":
            remedy = "--max-tokens with fewer tokens, or a shorter message"
        return ShardwiseError(f"the server refuses: {self.message}", remedy=remedy)


class Address:
    """The address of a server, and the API key sent to it."""

    def __init__(self, url: str, key: str | None = None) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ShardwiseError(f"{url} is no address: {error}", remedy="http://127.0.0.1:8000") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ShardwiseError(f"{url} is not the address of a server", remedy="http://127.0.0.1:8000")
        self.url, self._key, self._is_secure = url.rstrip("/").removesuffix("/v1"), key, parts.scheme == "https"
        self._host, self._port = parts.hostname, port or (443 if self._is_secure else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1")

    async def get(self, path: str) -> Any:
        return self._read(b"".join([part async for part in self._ask("GET", path, None)]))

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._read(b"".join([part async for part in self._ask("POST", path, body)]))

    def _read(self, raw: bytes) -> Any:
        try:
            return json.loads(raw)
        except ValueError:
            raise self._no_answer("what it says is not JSON") from None

    def _no_answer(self, why: str) -> HttpStatusError:
        return HttpStatusError(_NO_ANSWER, f"{self.url} does not answer as a server with OpenAI's API does: {why}")

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a stream as they arrive. A stream that breaks off is an error."""
        rest, is_whole = b"", False
        async for part in self._ask("POST", path, body):
            *lines, rest = (rest + part).split(b"\n\n")
            for line in lines:
                is_whole = is_whole or line == b"data: [DONE]"
                if line.startswith(b"data: ") and not is_whole:
                    event = self._read(line[6:])
                    if "error" in event:
                        raise HttpStatusError(500, event["error"]["message"])
                    yield event
        if not is_whole:
            raise self._no_answer("its stream of events broke off")

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> AsyncIterator[bytes]:
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._is_secure or None)
        except OSError as error:
            raise ShardwiseError(
                f"no server answers at {self.url}: {error.strerror or error}", remedy="shardwise serve MODEL"
            ) from None
        try:
            raw = b"" if body is None else json.dumps(body).encode()
            head = [
                f"{method} {self._path}{path} HTTP/1.1", f"Host: {self._host}:{self._port}", "Connection: close",
                "Content-Type: application/json", f"Content-Length: {len(raw)}",
                *([f"Authorization: Bearer {self._key}"] if self._key else []), "", "",
            ]  # fmt: skip
            writer.write("\r\n".join(head).encode() + raw)
            await writer.drain()
            status, headers = await _read_head(reader)
            parts = _parts(reader, headers)
            if status != 200:
                raise _error_in(status, b"".join([part async for part in parts]))
            async for part in parts:
                yield part
        except (EOFError, OSError, ValueError, IndexError, asyncio.LimitOverrunError) as error:
            raise self._no_answer(f"it is not HTTP, or broke off ({type(error).__name__})") from None
        finally:
            writer.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(lines[0].split()[1]), headers


async def _parts(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """Yield the body, however its length is encoded."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while (size := int((await reader.readline()).split(b";")[0], 16)) > 0:
            yield await reader.readexactly(size)
            await reader.readline()
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while part := await reader.read(1 << 16):
            yield part


def _error_in(status: int, raw: bytes) -> HttpStatusError:
    try:
        error = json.loads(raw)["error"]
        return HttpStatusError(status, str(error["message"]), code=error.get("code"), param=error.get("param"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return HttpStatusError(status, raw[:200].decode(errors="replace"))
