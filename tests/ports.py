"""Ports for servers that have to be told theirs before they start.

A port that the system hands out is free only until somebody else connects to anything: the next connection may get it.
So these lie below those that the system hands out, and are drawn by chance, so that tests beside each other differ.
"""

import random
import socket
from contextlib import ExitStack

_LOWEST, _HIGHEST = 10_000, 32_000


def free_ports(count: int) -> list[int]:
    """Different ports on which nobody listens now."""
    draw = random.SystemRandom()
    ports: list[int] = []
    with ExitStack() as held:
        while len(ports) < count:
            port = draw.randint(_LOWEST, _HIGHEST)
            try:
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            ports.append(port)
    return ports


def free_port() -> int:
    return free_ports(1)[0]
