"""The protocol of keepers: a line of JSON, then the bytes that it announces, if any; one request for a connection.

-> {"token": ..., "verb": "put", "generation": ..., "file": ..., "num_bytes": 812, "checksum": ...}  812 bytes
<- {"ok": true}
"""

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

_CHUNK_BYTES = 1 << 20
_MOST_LETTERS = 1 << 20


class WireError(Exception):
    """A message is invalid, or the other end has reported an error."""


def send_line(connection: socket.socket, content: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(content).encode() + b"\n")


def receive_line(stream: BinaryIO) -> dict[str, Any]:
    line = stream.readline(_MOST_LETTERS)
    if not line.endswith(b"\n"):
        raise WireError("the connection ended early")
    try:
        content = json.loads(line)
    except ValueError:
        raise WireError("a line is not valid JSON") from None
    if not isinstance(content, dict):
        raise WireError("a line is not an object")
    if "error" in content:
        raise WireError(str(content["error"]))
    return content


def send_file(connection: socket.socket, path: Path, num_bytes: int) -> None:
    with path.open("rb") as file:
        connection.sendfile(file, count=num_bytes)


def receive_file(stream: BinaryIO, path: Path, num_bytes: int) -> int:
    """Write `num_bytes` from the stream to a new file. Return their checksum."""
    left, number, buffer = num_bytes, 0, memoryview(bytearray(min(_CHUNK_BYTES, max(1, num_bytes))))
    with path.open("wb") as file:
        while left:
            length = stream.readinto(buffer[: min(left, len(buffer))])  # type: ignore[attr-defined]
            if not length:
                raise WireError(f"the connection ended {left} bytes early")
            number = crc32(buffer[:length], number)
            file.write(buffer[:length])
            left -= length
    return number


def checksum_of(path: Path) -> int:
    """Return the checksum of a whole file."""
    number, buffer = 0, memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb") as file:
        while length := file.readinto(buffer):
            number = crc32(buffer[:length], number)
    return number
