"""The first communication of a group over NCCL, which connects its ranks or fails.

NCCL waits minutes for a rank that it cannot reach, and that wait cannot be interrupted. So the first communication of
every group runs in a thread. If it does not finish in time, the error names the network interfaces and what to set; the
process ends, and the thread with it.
"""

import socket
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from shardwise import environment
from shardwise.errors import ShardwiseError
from shardwise.ranks.faults import Watch

#: Eight ranks that share a GPU take 1 s for a group (H200, NCCL 2.28).
CONNECT_SECONDS = 60.0
_CONNECTING = "the connecting of NCCL"


def first_talk(
    talk: Callable[[], None],
    group: dist.ProcessGroup,
    device: torch.device,
    watch: Watch | None = None,
    seconds: float = CONNECT_SECONDS,
) -> None:
    """Let a group communicate for the first time, when all its ranks are here. A failure becomes a clear error."""
    ended, wrong = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            talk()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except BaseException as error:
            wrong.append(error)
        finally:
            ended.set()

    threading.Thread(target=run, name="shardwise-first-talk", daemon=True).start()
    is_over = ended.wait(seconds) if watch is None else watch.wait_until(ended, _CONNECTING, seconds)
    if wrong and isinstance(wrong[0], dist.DistError):
        raise cannot_connect(group.size(), _reason(wrong[0])) from wrong[0]
    if wrong:
        raise wrong[0]
    if not is_over:
        raise cannot_connect(group.size(), f"not within {seconds:g} s")


def cannot_connect(num_ranks: int, reason: str, interfaces: list[str] | None = None) -> ShardwiseError:
    """Return the error for ranks that NCCL cannot connect. `interfaces` are those of this machine."""
    here = [name for _, name in socket.if_nameindex()] if interfaces is None else interfaces
    chosen = environment.find_variable("NCCL_SOCKET_IFNAME")
    told = "NCCL_SOCKET_IFNAME is not set" if chosen is None else f"NCCL_SOCKET_IFNAME is {chosen}"
    likely = next((name for name in here if name != "lo" and not name.startswith(("docker", "veth", "br-"))), "lo")
    return ShardwiseError(
        f"NCCL could not connect the {num_ranks} ranks of a group: {reason}. {told}, and"
        f" {socket.gethostname()} has the interfaces {', '.join(here)}",
        remedy=f"NCCL_SOCKET_IFNAME={likely} on every machine, the interface by which they reach each other, and"
        " NCCL_IB_DISABLE=1 where InfiniBand is not; NCCL_DEBUG=INFO shows what NCCL tries",
    )


def _reason(error: BaseException) -> str:
    """Return NCCL's reason in one line: its last error, if torch includes it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    after = [lines[number + 1] for number, line in enumerate(lines[:-1]) if line.startswith("Last error")]
    of_nccl = [line for line in lines if "nccl" in line.lower()]
    return (after or of_nccl or lines or ["no reason was given"])[0]
