"""Computations that go slower while transfers run beside them: how far each has come, and when it will end."""

from collections.abc import Iterable


class _Running:
    """The computation in progress on a rank, and the transfers beside it."""

    __slots__ = ("ends_at", "node", "num_transfers", "remaining", "since")

    def __init__(self) -> None:
        self.node: int | None = None
        self.remaining = 0.0
        self.since = 0.0
        self.ends_at = 0.0
        self.num_transfers = 0


class Paces:
    """What each rank computes, and at which pace. An end that is foretold moves whenever the pace changes."""

    def __init__(self, num_ranks: int, slowdown: float) -> None:
        self._running = [_Running() for _ in range(num_ranks)]
        self._slow = 1 + slowdown

    def start(self, rank: int, node: int, now: float, seconds: float) -> float:
        """Begin a computation that takes so long if nothing moves, and return its end if nothing changes."""
        running = self._running[rank]
        running.node, running.remaining, running.since = node, seconds, now
        running.ends_at = now + seconds * self._pace(running)
        return running.ends_at

    def finish(self, rank: int) -> None:
        self._running[rank].node = None

    def is_current(self, rank: int, node: int, now: float) -> bool:
        """Whether this is still the end of a computation, or was moved by a transfer that began or ended since."""
        running = self._running[rank]
        return running.node == node and running.ends_at == now

    def change(self, ranks: Iterable[int], now: float, num_more: int) -> list[tuple[float, int]]:
        """Transfers begin or end beside these ranks; return the new ends of the computations that it changes."""
        moved = []
        for rank in ranks:
            running = self._running[rank]
            old = self._pace(running)
            running.num_transfers += num_more
            new = self._pace(running)
            if running.node is None or old == new:
                continue
            running.remaining = max(0.0, running.remaining - (now - running.since) / old)
            running.since = now
            running.ends_at = now + running.remaining * new
            moved.append((running.ends_at, running.node))
        return moved

    def _pace(self, running: _Running) -> float:
        return self._slow if running.num_transfers else 1
