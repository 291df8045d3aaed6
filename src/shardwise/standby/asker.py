"""A proxy for a process that the standby server (`server.py`) forks: it forwards signals to the process, and exits with
its status. It also exits when its own parent is gone. Without a server, or if that refuses, there is no proxy: the
module runs in this process."""

import array
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from shardwise import environment
from shardwise.copies.detached import start_detached
from shardwise.copies.memory import find_id

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_REACH_SECONDS, _LOOK_SECONDS, _MOST_BYTES = 2.0, 0.5, 1 << 20


def address_of(run_id: str, node: str) -> str:
    """Return an abstract socket address: it has no file, ends with its server, and is per network namespace."""
    return f"\0shardwise-{os.getuid()}-{run_id}-{node}"[:100]


def find_server(folder: Path, node: str | None = None) -> socket.socket | None:
    """Return a connection to the standby server of a run, for this node or the named one; None if there is none."""
    run_id = find_id(folder)
    if run_id is None or not hasattr(socket, "SO_PEERCRED"):
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_REACH_SECONDS)
        connection.connect(address_of(run_id, node or environment.node_name()))
        return connection
    except OSError:
        connection.close()
        return None


def receive_request(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a request, and the file descriptors of its standard streams."""
    numbers = array.array("i")
    content, told, _, _ = connection.recvmsg(_MOST_BYTES, socket.CMSG_LEN(3 * numbers.itemsize))
    for level, kind, data in told:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    while not content.endswith(b"\n"):
        more = connection.recv(_MOST_BYTES)
        if not more:
            raise ValueError("the request ended early")
        content += more
    return json.loads(content), list(numbers)


def run_on_standby(folder: Path, module: str, words: Sequence[str]) -> int | None:
    """Run a module in a process of the server. Return its exit status, or None if there is no server. If a signal ends
    that process, end this one by the same signal."""
    connection = find_server(folder)
    if connection is None:
        return None
    request = {
        "module": module,
        "words": list(words),
        "variables": environment.all_variables(),
        "directory": str(Path.cwd()),
    }
    heard: list[int] = []
    before = {each: signal.signal(each, lambda number, _: heard.append(number)) for each in _PASSED_ON}
    with connection:
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
            text = json.dumps(request).encode() + b"\n"
            connection.sendall(text[connection.sendmsg([text], rights) :])
            stream = connection.makefile("rb")
            process = json.loads(stream.readline() or b"{}").get("process")
        except (OSError, ValueError):
            process = None
        if process is None:
            _restore(before)
            for number in heard:
                signal.raise_signal(number)
            return None

        def pass_on(number: int, _: FrameType | None) -> None:
            with suppress(ProcessLookupError):
                os.kill(process, number)

        for each in _PASSED_ON:
            signal.signal(each, pass_on)
        for number in heard:
            pass_on(number, None)
        parent = os.getppid()
        while not select.select([connection], [], [], _LOOK_SECONDS)[0]:
            if os.getppid() != parent:
                os._exit(1)
        connection.settimeout(None)
        # A killed server reports no status. The process has ended too, in an unknown way.
        status = int(json.loads(stream.readline() or b'{"status": -9}')["status"])
    if status < 0:
        sys.stdout.flush()
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def start_server(folder: Path, node: str, log: Path) -> None:
    """Start a server with the imports of this process. If there is one already, the new one exits at once."""
    names = sorted(name for name in sys.modules if name.startswith("shardwise.") or name == "torch._dynamo")
    words = ["--folder", str(folder), "--node", node, "--imports", *names, "torch.distributed.run"]
    start_detached([sys.executable, "-m", "shardwise.standby.server", *words], log)


def _restore(before: dict[signal.Signals, Any]) -> None:
    for each, handler in before.items():
        signal.signal(each, handler)
