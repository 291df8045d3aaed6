"""The name of this attempt at a run: one word for all ranks that `torchrun` has started together.

`torchrun` keeps one store for all attempts, and counts restarts on each machine separately: a machine that joined later
has counted fewer. So the first rank draws a word, and all ranks answer to it, each with its own token:

    rank 0    attempt = W                       waits for W/here/1, W/here/2 ...      W/go = all tokens
    rank 1    reads W, W/here/1 = its token                     waits for W/go with its token

A word of an earlier attempt has no `go` with this rank's token, so it is waited out.
"""

import json
import secrets
import time
from collections.abc import Callable

from shardwise.errors import ShardwiseError
from shardwise.torch_private import Store

_KEY = "shardwise/attempt"
_LOOK_SECONDS, _PATIENCE_SECONDS = 0.02, 300.0


def agree_on_attempt(store: Store, rank: int, num_ranks: int, patience: float = _PATIENCE_SECONDS) -> str:
    """Return the word of this attempt. Every rank calls this alike."""
    return _call(store, num_ranks, patience) if rank == 0 else _answer(store, rank, patience)


def _call(store: Store, num_ranks: int, patience: float) -> str:
    word = secrets.token_hex(8)
    store.set(_KEY, word)
    keys = {str(rank): f"{_KEY}/{word}/here/{rank}" for rank in range(1, num_ranks)}

    def missing() -> str | None:
        late = [rank for rank, key in keys.items() if not store.check([key])]
        return f"ranks {', '.join(late[:8])} have not come" if late else None

    _wait(missing, patience)
    store.set(f"{_KEY}/{word}/go", json.dumps({rank: store.get(key).decode() for rank, key in keys.items()}))
    return word


def _answer(store: Store, rank: int, patience: float) -> str:
    token, answered, found = secrets.token_hex(8), "", ""

    def missing() -> str | None:
        nonlocal answered, found
        word = store.get(_KEY).decode() if store.check([_KEY]) else ""
        if word and word != answered:
            store.set(f"{_KEY}/{word}/here/{rank}", token)
            answered = word
        go = f"{_KEY}/{answered}/go"
        if answered and store.check([go]) and json.loads(store.get(go)).get(str(rank)) == token:
            found = answered
            return None
        return f"rank 0 has not called rank {rank}"

    _wait(missing, patience)
    return found


def _wait(missing: Callable[[], str | None], patience: float) -> None:
    deadline = time.monotonic() + patience
    while (why := missing()) is not None:
        if time.monotonic() > deadline:
            raise ShardwiseError(f"not all ranks have arrived after {patience:.0f} s: {why}")
        time.sleep(_LOOK_SECONDS)
