"""The keeper of a machine: `python -m shardwise.copies.keeper --folder RUN --node NAME`, one for each run and machine.

It serves the copies in this machine's memory, receives those of a neighbour, and frees the memory when the run is over,
or after half an hour without a process of the run. The copies are files in memory: if a keeper is killed nothing is
lost, and the next one continues to serve them.
"""

import argparse
import hmac
import json
import os
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any, BinaryIO, cast

from shardwise.copies.detached import let_go_of_files
from shardwise.copies.memory import COPIES, Memory, find_id, memory_of, parse_generation
from shardwise.copies.wire import WireError, checksum_of, receive_file, receive_line, send_file, send_line
from shardwise.output import write_whole

#: How long memory is kept for a run without processes, and how often a keeper checks.
_PATIENCE_SECONDS, _LOOK_SECONDS = 1800.0, 0.5
_SILENCE_SECONDS = 60.0


class KeptFiles:
    """Answers the requests to a keeper, each in a thread of its own."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._lock, self._num_staying, self._left = threading.Lock(), 0, time.monotonic()
        self.is_over = threading.Event()

    def answer(self, asked: dict[str, Any], stream: BinaryIO, connection: socket.socket) -> None:
        """Answer one request."""
        verbs: dict[str, Callable[..., None]] = {
            "list": self._list, "put": self._put, "get": self._get, "stay": self._stay, "over": self._over
        }  # fmt: skip
        verb = verbs.get(str(asked.get("verb")))
        if verb is None:
            raise WireError(f"there is no verb {asked.get('verb')!r}")
        verb(asked, stream, connection)

    def is_forgotten(self, patience: float) -> bool:
        """Return whether no process of the run has been connected for `patience` seconds."""
        with self._lock:
            return not self._num_staying and time.monotonic() - self._left > patience

    def _list(self, _: dict[str, Any], __: BinaryIO, connection: socket.socket) -> None:
        found = {each.name: ranks for each, ranks in self._memory.pieces().items()}
        when = {name: (self._memory.folder / name).stat().st_mtime for name in found}
        send_line(connection, {"pieces": found, "when": when})

    def _put(self, asked: dict[str, Any], stream: BinaryIO, connection: socket.socket) -> None:
        path = self._path(asked)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            if receive_file(stream, beside, int(asked["num_bytes"])) != asked["checksum"]:
                raise WireError(f"{path.name} has another checksum than was sent")
            beside.rename(path)
        finally:
            beside.unlink(missing_ok=True)
        send_line(connection, {"ok": True})

    def _get(self, asked: dict[str, Any], _: BinaryIO, connection: socket.socket) -> None:
        path = self._path(asked)
        num_bytes = path.stat().st_size
        send_line(connection, {"num_bytes": num_bytes, "checksum": checksum_of(path)})
        send_file(connection, path, num_bytes)

    def _stay(self, _: dict[str, Any], stream: BinaryIO, connection: socket.socket) -> None:
        """Count a process of the run as present for as long as this connection is open."""
        with self._lock:
            self._num_staying += 1
        try:
            send_line(connection, {"ok": True})
            connection.settimeout(None)
            stream.read(1)
        finally:
            with self._lock:
                self._num_staying -= 1
                self._left = time.monotonic()

    def _over(self, _: dict[str, Any], __: BinaryIO, connection: socket.socket) -> None:
        send_line(connection, {"ok": True})
        self.is_over.set()

    def _path(self, asked: dict[str, Any]) -> Path:
        """Return the path of the requested file. Only files of a generation are allowed."""
        generation, file = parse_generation(str(asked.get("generation"))), str(asked.get("file"))
        if generation is None or Path(file).name != file or not file.startswith("rank-"):
            raise WireError(f"{asked.get('generation')}/{file} is not a file of a copy")
        return self._memory.path(generation, file)


def _server(keeper: KeptFiles, token: str) -> socketserver.ThreadingTCPServer:
    class Handler(socketserver.StreamRequestHandler):
        timeout = _SILENCE_SECONDS

        def handle(self) -> None:
            connection = cast("socket.socket", self.request)
            with suppress(OSError):
                try:
                    asked = receive_line(cast("BinaryIO", self.rfile))
                    if not hmac.compare_digest(str(asked.get("token", "")).encode(), token.encode()):
                        raise WireError("the token is another run's")
                    keeper.answer(asked, cast("BinaryIO", self.rfile), connection)
                except (WireError, OSError, KeyError, TypeError, ValueError) as error:
                    send_line(connection, {"error": f"{type(error).__name__}: {error}"})

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads, allow_reuse_address, request_queue_size = True, True, 128

    return Server(("", 0), Handler)


def keep(folder: Path, node: str, addresses: Sequence[str], patience: float) -> int:
    """Serve until the run is over. A second keeper of the same machine ends at once."""
    run_id = find_id(folder)
    if run_id is None:
        print(f"error: there is no run with copies in {folder}", file=sys.stderr)
        return 1
    memory = memory_of(run_id, node)
    memory.make()
    handle = os.open(memory.folder / ".keeper", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        flock(handle, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return 0
    keeper, token = KeptFiles(memory), secrets.token_hex(16)
    with _server(keeper, token) as server:
        threading.Thread(target=server.serve_forever, name="shardwise-copies", daemon=True).start()
        place = folder / COPIES / f"{memory.folder.name}.json"
        told = {"node": node, "addresses": list(addresses), "port": server.server_address[1], "token": token,
                "process": os.getpid()}  # fmt: skip
        write_whole(place, json.dumps(told), is_private=True)
        while not keeper.is_over.wait(_LOOK_SECONDS) and not keeper.is_forgotten(patience) and memory.folder.is_dir():
            if find_id(folder) != run_id:  # The folder of the run was deleted, or is another run's.
                break
        server.shutdown()
        with suppress(OSError, ValueError):
            if json.loads(place.read_bytes()).get("token") == token:
                place.unlink()
    memory.forget()
    return 0


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m shardwise.copies.keeper")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--address", action="append", default=[])
    parser.add_argument("--patience", type=float, default=_PATIENCE_SECONDS)
    told = parser.parse_args(words)
    return keep(told.folder, told.node, told.address or ["127.0.0.1"], told.patience)


if __name__ == "__main__":
    let_go_of_files()
    sys.exit(main(sys.argv[1:]))
