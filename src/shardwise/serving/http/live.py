"""The engine's live state for the page: requests as bars, blocks in use, tokens per second."""

import time
from collections import deque
from typing import Any

from shardwise.serving.http.engine_loop import EngineLoop

#: The window for tokens per second, two seconds; and the most requests shown as bars.
_SECONDS = 2.0
_MOST_BARS = 64


class LiveView:
    """Counts tokens as they come; the rest is looked up on request."""

    def __init__(self) -> None:
        self._steps = deque[tuple[float, int]](maxlen=100_000)

    def add(self, num_tokens: int) -> None:
        """Count tokens. Called in the engine's thread."""
        self._steps.append((time.monotonic(), num_tokens))

    def rate(self) -> float:
        since = time.monotonic() - _SECONDS
        return sum(count for at, count in list(self._steps) if at >= since) / _SECONDS

    def shown(self, loop: EngineLoop) -> dict[str, Any]:
        load, now, tickets = loop.load, time.monotonic(), loop.tickets()
        bars = [
            {
                "id": ticket.request.id[-14:],
                "prompt": len(ticket.request.prompt),
                "written": ticket.num_tokens,
                "most": ticket.request.sampling.max_tokens,
                "state": "waiting" if ticket.begun_at is None else "reading" if ticket.first_at is None else "writing",
                "seconds": round(now - ticket.asked_at, 2),
            }
            for ticket in tickets[:_MOST_BARS]
        ]
        return {
            "failure": loop.failure,
            "tokens_per_second": round(self.rate(), 1),
            "num_running": load.num_running,
            "num_waiting": load.num_waiting + loop.num_waiting,
            "num_blocks": load.num_blocks,
            "num_used_blocks": load.num_used_blocks,
            "prompt_tokens": load.prompt_tokens,
            "generation_tokens": load.generation_tokens,
            "prefix_cache_queries": load.prefix_cache_queries,
            "prefix_cache_hits": load.prefix_cache_hits,
            "num_preemptions": load.num_preemptions,
            "kv_offload_store_bytes": load.kv_offload_store_bytes,
            "kv_offload_load_bytes": load.kv_offload_load_bytes,
            "requests": bars,
            "num_more": max(0, len(tickets) - _MOST_BARS),
        }
