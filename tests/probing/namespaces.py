"""Ranks in network namespaces, each a host of its own, with a set rate on every way from one to another.

    ns 0 --veth-- bridge --veth-- ns 1        from each, htb has a class for each other host's address

Rates are of the wire: frames of 9,000 bytes leave 99 % of them for what is sent. The processes are forked from this
one, which has imported torch, and each enters its namespace before it has a socket.
"""

import ctypes
import os
import pickle
import subprocess
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MEGABIT = 1e6 / 8
_MTU = 9000


class Fabric:
    """Namespaces on one bridge, with `rates[i][j]` bytes/s from the i-th to the j-th. A context."""

    def __init__(self, rates: Sequence[Sequence[float]]) -> None:
        self.rates, self.name = rates, f"sw{os.getpid() % 100_000}"

    @property
    def size(self) -> int:
        return len(self.rates)

    def space(self, number: int) -> str:
        return f"{self.name}-{number}"

    def address(self, number: int) -> str:
        return f"10.213.{number // 250}.{number % 250 + 1}"

    def __enter__(self) -> "Fabric":
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for number in range(self.size):
            subprocess.run(["ip", "netns", "del", self.space(number)], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", f"{self.name}-b"], capture_output=True, check=False)

    def _make(self) -> None:
        middle = f"{self.name}-b"
        _call("ip", "netns", "add", middle)
        _in(middle, "link add br0 type bridge", f"link set br0 mtu {_MTU} up")
        for number in range(self.size):
            space = self.space(number)
            _call("ip", "netns", "add", space)
            _in(space, "link set lo up", f"link add eth0 mtu {_MTU} type veth peer name v{number} netns {middle}")
            # Segments come as they go over the wire: of 64 KiB at once, the last would pass without waiting.
            _in(space, "link set eth0 gso_max_segs 1")
            _in(space, f"addr add {self.address(number)}/16 dev eth0", "link set eth0 up")
            _in(middle, f"link set v{number} mtu {_MTU} master br0 up")
            self._shape(number)

    def _shape(self, number: int) -> None:
        lines = ["qdisc add dev eth0 root handle 1: htb"]
        for other in range(self.size):
            if other == number:
                continue
            rate, mark = int(self.rates[number][other] * 8), f"1:{other + 10:x}"
            lines.append(
                f"class add dev eth0 parent 1: classid {mark} htb rate {rate}bit burst 9200 cburst 9200 quantum 9200"
            )
            lines.append(
                "filter add dev eth0 parent 1: protocol ip prio 1 u32 match ip dst"
                f" {self.address(other)}/32 flowid {mark}"
            )
        _call("ip", "netns", "exec", self.space(number), "tc", "-batch", "-", given="\n".join(lines) + "\n")

    def run(
        self, fn: Callable[..., Any], *args: Any, variables: Callable[[int], dict[str, str]] | None = None
    ) -> list[Any]:
        """Run `fn(rank, *args)` in a process for each namespace; what each returns. One that fails fails all."""
        children = []
        for rank in range(self.size):
            reads, writes = os.pipe()
            process = os.fork()
            if process == 0:
                os.close(reads)
                self._child(rank, writes, fn, args, {} if variables is None else variables(rank))
            os.close(writes)
            children.append((process, reads))
        told = []
        for process, reads in children:
            with os.fdopen(reads, "rb") as pipe:
                told.append(pipe.read())
            os.waitpid(process, 0)
        results = [pickle.loads(each) if each else (False, "it ended without a word") for each in told]
        for rank, (is_well, found) in enumerate(results):
            assert is_well, f"rank {rank}: {found}"
        return [found for _, found in results]

    def _child(self, rank: int, writes: int, fn: Callable[..., Any], args: Any, variables: dict[str, str]) -> None:
        try:
            enter(self.space(rank))
            os.environ.update(GLOO_SOCKET_IFNAME="eth0", **variables)
            told = (True, fn(rank, *args))
        except BaseException:
            told = (False, traceback.format_exc())
        with os.fdopen(writes, "wb") as pipe:
            pickle.dump(told, pipe)
        os._exit(0)


def enter(space: str) -> None:
    """Go on in a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(f"/run/netns/{space}", os.O_RDONLY)
    if libc.setns(handle, 0) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.close(handle)


def find_hindrance() -> str | None:
    """Why namespaces with shaped links cannot be made here, if they cannot."""
    if os.name != "posix" or not Path("/proc/self/ns/net").exists():
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Fabric([[0.0, MEGABIT], [MEGABIT, 0.0]]):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", "") or str(error)
        return f"no namespaces with shaped links here: {str(why).strip()}"


def _in(space: str, *words: str) -> None:
    for each in words:
        _call("ip", "-n", space, *each.split())


def _call(*words: str, given: str | None = None) -> None:
    subprocess.run(words, input=given, capture_output=True, check=True, text=True)
