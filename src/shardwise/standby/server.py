"""The standby server, from which restarted ranks are forked: `python -m shardwise.standby.server`.

Python, torch and our own modules take seconds to import, and all ranks of a machine import them at once. The server has
done so, and has no other state: no CUDA, no process group, no thread. A request says what to run (module, arguments,
environment, working directory), and passes the standard streams of the asker.

    torchrun -- starts --> asker (`asker.py`) -- asks --> server
                             |                              | forks
                             `-- forwards signals to ---> the rank, which ends with the asker

It serves only its own user, and refuses requests once one of our source files has changed.
"""

import argparse
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from shardwise import environment
from shardwise.copies.detached import let_go_of_files
from shardwise.copies.memory import find_id, memory_of
from shardwise.standby.asker import address_of, receive_request

_LOOK_SECONDS = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_OURS = Path(__file__).parents[1]


class Server:
    """Forks the requested processes, and reports their exit statuses."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self._began = listener, time.time()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def serve(self, is_over: Any) -> None:
        """Serve until `is_over()`. In a forked process this does not return."""
        while not is_over():
            for key, _ in self._selector.select(_LOOK_SECONDS):
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    self._begin(connection)
                else:
                    self._end(key)

    def _begin(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError):
            connection.settimeout(5.0)
            _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            request, files = receive_request(connection)
            if user == os.getuid() and len(files) == 3 and not self._has_changed():
                connection.settimeout(None)
                process = os.fork()
                if not process:
                    self._run(connection, request, files)
                connection.sendall(json.dumps({"process": process}).encode() + b"\n")
                self._selector.register(os.pidfd_open(process), selectors.EVENT_READ, (process, connection))
                connection = None  # type: ignore[assignment]
            for each in files:
                os.close(each)
        if connection is not None:
            connection.close()

    def _end(self, key: selectors.SelectorKey) -> None:
        """Report the end of a process to its asker."""
        process, connection = key.data
        self._selector.unregister(key.fileobj)
        os.close(key.fd)
        _, status = os.waitpid(process, 0)
        with suppress(OSError):
            connection.sendall(json.dumps({"status": os.waitstatus_to_exitcode(status)}).encode() + b"\n")
        connection.close()

    def _has_changed(self) -> bool:
        """Return whether a source file of ours has changed since its import."""
        files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        ours = [Path(file) for file in files if file is not None and Path(file).is_relative_to(_OURS)]
        return any(not each.exists() or each.stat().st_mtime > self._began for each in ours)

    def _run(self, connection: socket.socket, request: dict[str, Any], files: list[int]) -> NoReturn:
        """Run the requested module, in the forked process."""
        self._listener.close()
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self._listener:
                os.close(key.fd)
                key.data[1].close()
        self._selector.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        for each in _SIGNALS:
            signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)
        sys.stdout, sys.stderr = (open(number, "w", closefd=False, buffering=1) for number in (1, 2))  # noqa: SIM115
        environment.replace_all(request["variables"])
        environment.come_from_standby()
        os.chdir(request["directory"])
        threading.Thread(target=_end_with, args=(connection,), name="shardwise-asker", daemon=True).start()
        sys.argv = [request["module"], *request["words"]]
        warnings.simplefilter("ignore", RuntimeWarning)  # That the module is imported already, which is intended.
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        sys.exit(0)


def _end_with(connection: socket.socket) -> None:
    """End this process when its asker has ended, for any reason."""
    with suppress(OSError):
        connection.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m shardwise.standby.server")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--imports", nargs="*", default=[])
    told = parser.parse_args(words)
    run_id = find_id(told.folder)
    if run_id is None:
        return 1
    if not (hasattr(os, "pidfd_open") and hasattr(socket, "SO_PEERCRED")):
        return 0  # Not Linux. Ranks are started without a server.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(address_of(run_id, told.node))
        except OSError:
            return 0  # There is a server already.
        for each in told.imports:
            import_module(each)
        listener.listen(64)
        memory = memory_of(run_id, told.node).folder  # Its keeper frees it when the run is over, or forgotten.
        Server(listener).serve(lambda: find_id(told.folder) != run_id or not memory.is_dir())
    return 0


if __name__ == "__main__":
    let_go_of_files()
    sys.exit(main(sys.argv[1:]))
