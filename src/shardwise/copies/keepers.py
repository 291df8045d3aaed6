"""The client side of a run's keepers: starting them, listing their copies, and transferring files."""

import json
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from shardwise import environment
from shardwise.copies.detached import start_detached
from shardwise.copies.memory import COPIES, ID, Generation, Memory, parse_generation
from shardwise.copies.wire import WireError, checksum_of, receive_file, receive_line, send_file, send_line

#: Timeouts for connecting to a keeper, for its answer, and for its start on a busy machine.
_REACH_SECONDS, _ANSWER_SECONDS, _START_SECONDS = 1.5, 60.0, 60.0
_POLL_SECONDS = 0.02
#: A generation, the ranks whose pieces a keeper has, and when the last of them arrived, in seconds since 1970.
DatedPieces = tuple[Generation, list[int], float]
#: A failed connection, and an invalid answer.
FAILURES = (OSError, WireError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeper:
    """The address of a keeper."""

    node: str
    addresses: tuple[str, ...]
    port: int
    token: str

    @contextmanager
    def asked(self, verb: str, **words: Any) -> Iterator[tuple[socket.socket, BinaryIO]]:
        """Send a request to the first address that answers. Yield the connection for further data."""
        with _reached(self.addresses, self.port) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            with connection.makefile("rb") as stream:
                send_line(connection, {"token": self.token, "verb": verb, **words})
                yield connection, stream

    def pieces(self) -> dict[Generation, list[int]]:
        """Return the ranks whose pieces are there, by generation."""
        return {generation: ranks for generation, ranks, _ in self.dated_pieces()}

    def dated_pieces(self) -> list[DatedPieces]:
        """Return the same with the time when the last piece arrived, in seconds since 1970."""
        with self.asked("list") as (_, stream):
            told = receive_line(stream)
        found = ((parse_generation(name), ranks, told["when"][name]) for name, ranks in told["pieces"].items())
        return [(generation, ranks, when) for generation, ranks, when in found if generation is not None]

    def put(self, generation: Generation, path: Path) -> None:
        """Send a file. When this returns, the keeper has all of it."""
        num_bytes = path.stat().st_size
        words = {"generation": generation.name, "file": path.name, "num_bytes": num_bytes}
        with self.asked("put", **words, checksum=checksum_of(path)) as (connection, stream):
            send_file(connection, path, num_bytes)
            receive_line(stream)

    def get(self, generation: Generation, file: str, path: Path) -> None:
        """Fetch a file, completely or not at all."""
        beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            with self.asked("get", generation=generation.name, file=file) as (_, stream):
                told = receive_line(stream)
                if receive_file(stream, beside, told["num_bytes"]) != told["checksum"]:
                    raise WireError(f"{file} of {self.node} came with another checksum than it was sent with")
            beside.rename(path)
        finally:
            beside.unlink(missing_ok=True)

    def end(self) -> None:
        """Make the keeper free its memory, because the run is over."""
        with suppress(*FAILURES), self.asked("over") as (_, stream):
            receive_line(stream)


class Staying:
    """A connection that tells a keeper, while it is open, that a process of the run is alive."""

    def __init__(self, keeper: Keeper) -> None:
        self._connection = _reached(keeper.addresses, keeper.port)
        try:
            send_line(self._connection, {"token": keeper.token, "verb": "stay"})
            with self._connection.makefile("rb") as stream:
                receive_line(stream)
        except BaseException:
            self._connection.close()
            raise

    @property
    def is_heard(self) -> bool:
        """Whether the keeper is still alive."""
        try:
            self._connection.settimeout(0)
            return bool(self._connection.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        self._connection.close()


def _reached(addresses: tuple[str, ...], port: int) -> socket.socket:
    for number, address in enumerate(addresses):
        try:
            return socket.create_connection((address, port), timeout=_REACH_SECONDS)
        except OSError:
            if number == len(addresses) - 1:
                raise
    raise OSError("the keeper has told no address")


def known_keepers(folder: Path) -> list[Keeper]:
    """Return the keepers that have written their address. They may no longer be alive."""
    found = []
    for path in sorted((folder / COPIES).glob("*.json")):
        with suppress(OSError, ValueError, KeyError):
            told = json.loads(path.read_bytes())
            found.append(
                Keeper(
                    node=told["node"],
                    addresses=tuple(told["addresses"]),
                    port=int(told["port"]),
                    token=told["token"],
                )
            )
    return found


def find_keeper(folder: Path, node: str) -> Keeper | None:
    return next((each for each in known_keepers(folder) if each.node == node), None)


def survey(folder: Path) -> dict[str, list[DatedPieces]]:
    """Return the pieces of all keepers of a run that answer, by node."""
    keepers = known_keepers(folder)

    def ask(keeper: Keeper) -> list[DatedPieces] | None:
        try:
            return keeper.dated_pieces()
        except FAILURES:
            return None

    with ThreadPoolExecutor(max(1, min(32, len(keepers)))) as pool:
        answers = pool.map(ask, keepers)
        return {keeper.node: told for keeper, told in zip(keepers, answers, strict=True) if told is not None}


def holders_of(
    there: Mapping[str, list[DatedPieces]],
) -> dict[Generation, dict[int, list[str]]]:
    """Return, for each complete generation, the nodes that have each rank's piece; newest first."""
    found: dict[Generation, dict[int, list[str]]] = {}
    for node, pieces in there.items():
        for generation, ranks, _ in pieces:
            for rank in ranks:
                found.setdefault(generation, {}).setdefault(rank, []).append(node)
    whole = {each: ranks for each, ranks in found.items() if set(range(each.num_ranks)) <= ranks.keys()}
    return dict(sorted(whole.items(), reverse=True))


def start_keeper(folder: Path, node: str, memory: Memory) -> None:
    """Start a keeper that outlives this process. If the node has one already, the new one exits at once."""
    memory.make()
    words = [sys.executable, "-m", "shardwise.copies.keeper", "--folder", str(folder), "--node", node]
    for address in _own_addresses():
        words += ["--address", address]
    start_detached(words, folder / COPIES / f"{memory.folder.name}.log")


def wait_for_keeper(folder: Path, node: str) -> Staying:
    """Wait until the keeper of this node is up. Raise its last failure if it does not come up in time."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        keeper = find_keeper(folder, node)
        try:
            if keeper is None:
                raise OSError("it has not said where it listens")
            return Staying(keeper)
        except FAILURES:
            if time.monotonic() > deadline:
                raise
        time.sleep(_POLL_SECONDS)


def forget_copies(folder: Path) -> None:
    """Free the memory of a finished run's copies, on all machines that answer."""
    for keeper in known_keepers(folder):
        keeper.end()
        (folder / COPIES / f"{keeper.node}.json").unlink(missing_ok=True)
    (folder / COPIES / ID).unlink(missing_ok=True)


def _own_addresses() -> list[str]:
    """Return the addresses of this machine: that of its route to the master, then those of its host name."""
    master, found = environment.find_master(), []
    if master is not None:
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((master[0], 9))  # UDP: nothing is sent, the system only selects a route.
            found.append(way.getsockname()[0])
    with suppress(OSError):
        found += [str(each[4][0]) for each in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    return list(dict.fromkeys([*found, socket.gethostname()])) if found else ["127.0.0.1"]
