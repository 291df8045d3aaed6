"""Exchange of objects between ranks through their shared store: without a group, and without waits to break."""

import pickle
import time
from collections.abc import Callable
from typing import Any

from shardwise.torch_private import Store

_LOOK_SECONDS = 0.005


class StoreMeeting:
    """One rank's part. The n-th exchange of each rank belongs to the n-th exchange of the others."""

    def __init__(self, store: Store, name: str, rank: int, num_ranks: int) -> None:
        self._store, self._name, self._rank, self._num_ranks = store, name, rank, num_ranks
        self._num_exchanges = self._num_refusals = 0

    def exchange(self, given: Any, check: Callable[[], None]) -> list[Any]:
        """Return the objects of all ranks. While waiting, call `check`, which raises if a rank will never come."""
        self._num_exchanges += 1
        keys = [f"{self._name}/exchange {self._num_exchanges}/{rank}" for rank in range(self._num_ranks)]
        self._store.set(keys[self._rank], pickle.dumps(given))  # type: ignore[arg-type]  # It takes bytes as well.
        while not self._store.check(keys):
            check()
            time.sleep(_LOOK_SECONDS)
        return [pickle.loads(self._store.get(key)) for key in keys]

    def all_refuse(self, seconds: float, is_over: Callable[[], bool]) -> bool:
        """Return whether, within this time, all ranks refuse or the wait is over for another reason."""
        self._num_refusals += 1
        key, deadline = f"{self._name}/refusal {self._num_refusals}", time.monotonic() + seconds
        self._store.add(key, 1)
        while self._store.add(key, 0) < self._num_ranks and not is_over():
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        return True
