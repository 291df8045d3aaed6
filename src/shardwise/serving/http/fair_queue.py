"""The queue before the engine. Lower priority comes first; among equals, clients take turns, one request each.

A full queue refuses the client with the most entries: one that asks for a thousand answers does not keep out one that
asks for a single answer.
"""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """At most `most` entries. Not thread-safe."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._by_priority: dict[int, OrderedDict[str, deque[T]]] = {}
        self._counts: dict[str, int] = {}
        self._num_entries = self._num_crowds = 0

    def __len__(self) -> int:
        return self._num_entries

    def refuses_all(self) -> bool:
        """Whether it is full and no client has more than one entry: then any new entry is refused."""
        return self._num_entries >= self.most and not self._num_crowds

    def put(self, entry: T, *, client: str, priority: int = 0) -> T | None:
        """Add an entry. Return the one removed for it: none, the newest of the client with the most, or itself."""
        leaves = None
        if len(self) >= self.most:
            crowd = max(self._counts, key=lambda each: self._counts[each], default=client)
            if self._counts.get(crowd, 0) <= self._counts.get(client, 0) + 1:
                return entry
            leaves = self._take_newest(crowd)
        self._by_priority.setdefault(priority, OrderedDict()).setdefault(client, deque()).append(entry)
        self._counts[client] = self._counts.get(client, 0) + 1
        self._num_crowds += self._counts[client] == 2
        self._num_entries += 1
        return leaves

    def take(self) -> T | None:
        """Remove and return the next entry."""
        if not self._by_priority:
            return None
        priority = min(self._by_priority)
        clients = self._by_priority[priority]
        client, waiting = next(iter(clients.items()))
        entry = waiting.popleft()
        clients.move_to_end(client)
        self._forget(priority, client)
        return entry

    def remove(self, entry: T) -> bool:
        """Remove an entry whose client has left. Return whether it was here."""
        for priority, clients in self._by_priority.items():
            for client, waiting in clients.items():
                if entry in waiting:
                    waiting.remove(entry)
                    self._forget(priority, client)
                    return True
        return False

    def _take_newest(self, client: str) -> T:
        priority = max(priority for priority, clients in self._by_priority.items() if client in clients)
        entry = self._by_priority[priority][client].pop()
        self._forget(priority, client)
        return entry

    def _forget(self, priority: int, client: str) -> None:
        """Count one entry of a client less, and remove empty containers."""
        self._num_entries -= 1
        self._counts[client] -= 1
        self._num_crowds -= self._counts[client] == 1
        if not self._counts[client]:
            del self._counts[client]
        clients = self._by_priority[priority]
        if not clients[client]:
            del clients[client]
        if not clients:
            del self._by_priority[priority]
