"""What ranks tell each other by way of the store that they share: no group is needed, and no wait has to be broken."""

import pickle
import time
from collections.abc import Callable
from typing import Any

from shardwise.torch_private import Store

_LOOK_SECONDS = 0.005


class StoreMeeting:
    """One rank's part. Each rank's first meeting is with the first of the others, its second with their second."""

    def __init__(self, store: Store, name: str, rank: int, num_ranks: int) -> None:
        self._store, self._name, self._rank, self._num_ranks = store, name, rank, num_ranks
        self._num_exchanges = self._num_refusals = 0

    def exchange(self, given: Any, check: Callable[[], None]) -> list[Any]:
        """What each rank gives. `check` is called meanwhile, and raises where nobody comes any more."""
        self._num_exchanges += 1
        keys = [f"{self._name}/exchange {self._num_exchanges}/{rank}" for rank in range(self._num_ranks)]
        self._store.set(keys[self._rank], pickle.dumps(given))  # type: ignore[arg-type]  # It takes bytes as well.
        while not self._store.check(keys):
            check()
            time.sleep(_LOOK_SECONDS)
        return [pickle.loads(self._store.get(key)) for key in keys]

    def all_refuse(self, seconds: float, is_over: Callable[[], bool]) -> bool:
        """Whether all ranks come to a refusal, or it is over for another reason, in this time."""
        self._num_refusals += 1
        key, deadline = f"{self._name}/refusal {self._num_refusals}", time.monotonic() + seconds
        self._store.add(key, 1)
        while self._store.add(key, 0) < self._num_ranks and not is_over():
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        return True
