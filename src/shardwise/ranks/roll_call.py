"""The name of this attempt at a run: one word for all ranks that `torchrun` has started together.

`torchrun` keeps one store for all attempts, and counts restarts on each machine separately: a machine that joined later
has counted fewer. So the first rank draws a word, and all ranks answer to it, each with its own token:

    rank 0    attempt = W                       waits for W/here/1, W/here/2 ...      W/go = all tokens
    rank 1    reads W, W/here/1 = its token                     waits for W/go with its token

A word of an earlier attempt has no `go` with this rank's token, so it is waited out. A rank may be slow to come, as it
imports what it needs. One whose process is stopped does not come: it is named, as by a `Pulse`, which begins later.
"""

import json
import secrets
import time
from collections.abc import Callable
from functools import partial

from shardwise.errors import ShardwiseError
from shardwise.ranks.pulse import SILENT_SECONDS, is_stopped
from shardwise.ranks.rank_error import RankError
from shardwise.torch_private import Store

_KEY = "shardwise/attempt"
_LOOK_SECONDS, _PATIENCE_SECONDS = 0.02, 300.0
#: How often it is looked whether those that are late are stopped.
_LOOK_AT_LATE_SECONDS = 1.0

#: Waits for the ranks that a function says are late, and that another one describes.
_Wait = Callable[[Callable[[], list[int]], Callable[[list[int]], str]], None]


def agree_on_attempt(
    store: Store, rank: int, num_ranks: int, patience: float = _PATIENCE_SECONDS, stopped: float = SILENT_SECONDS / 2
) -> str:
    """Return the word of this attempt. Every rank calls this alike. A rank that is stopped is waited for so long."""
    wait = partial(_wait, patience=patience, stopped=stopped)
    return _call(store, num_ranks, wait) if rank == 0 else _answer(store, rank, wait)


def _call(store: Store, num_ranks: int, wait: _Wait) -> str:
    word = secrets.token_hex(8)
    store.set(_KEY, word)
    keys = {rank: f"{_KEY}/{word}/here/{rank}" for rank in range(1, num_ranks)}

    def late() -> list[int]:
        return [rank for rank, key in keys.items() if not store.check([key])]

    wait(late, lambda ranks: f"ranks {', '.join(map(str, ranks[:8]))} have not come")
    store.set(f"{_KEY}/{word}/go", json.dumps({rank: store.get(key).decode() for rank, key in keys.items()}))
    return word


def _answer(store: Store, rank: int, wait: _Wait) -> str:
    token, answered, found = secrets.token_hex(8), "", ""

    def late() -> list[int]:
        nonlocal answered, found
        word = store.get(_KEY).decode() if store.check([_KEY]) else ""
        if word and word != answered:
            store.set(f"{_KEY}/{word}/here/{rank}", token)
            answered = word
        go = f"{_KEY}/{answered}/go"
        if answered and store.check([go]) and json.loads(store.get(go)).get(str(rank)) == token:
            found = answered
            return []
        return [0]

    wait(late, lambda _: f"rank 0 has not called rank {rank}")
    return found


def _wait(late: Callable[[], list[int]], why: Callable[[list[int]], str], *, patience: float, stopped: float) -> None:
    """Wait until no rank is late; `why` describes those that are."""
    begun = looked = time.monotonic()
    stopped_since: dict[int, float] = {}
    while ranks := late():
        now = time.monotonic()
        if now - begun > patience:
            raise ShardwiseError(f"not all ranks have arrived after {patience:.0f} s: {why(ranks)}")
        if now - looked > min(_LOOK_AT_LATE_SECONDS, stopped):
            looked = now
            stopped_since = {each: stopped_since.get(each, now) for each in ranks if is_stopped(each)}
            for rank, since in stopped_since.items():
                if now - since >= stopped:
                    raise RankError(
                        f"rank {rank} has not answered for {now - begun:.0f} s: its process is stopped",
                        remedy="the same command again, or kill -CONT of that process",
                        rank=rank,
                    )
        time.sleep(_LOOK_SECONDS)
