"""Ranks that stay up and are shared by all tests that want as many."""

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from shardwise.ranks.faults import Watch
from shardwise.ranks.gpus import Gpus
from shardwise.ranks.spawn import Ranks
from tests import rank_server
from tests.settings import settings_kept
from tests.trials import are_untried, untried

#: What ranks need beside the runtime, by one of each: importing it takes a rank 3 s of a core (torch 2.13,
#: transformers 5).
_IMPORTED_ONCE = [
    "shardwise.ranks.worker",
    "shardwise.engine.parallelize",
    "torch._dynamo",
    "transformers.models.gpt2.modeling_gpt2",
    "tests.conformance.processes",
]


def import_once() -> None:
    """Let the server that ranks are forked from import what they need. If it is up already, each does so itself."""
    if sys.platform == "linux":
        rank_server.start(_IMPORTED_ONCE)


#: After so long without a function ranks end; to start them again takes no more than they would by waiting. gloo looks
#: a hundred times a second for what has come: 2 ms of a core a second and rank.
_IDLE_SECONDS = 15.0


class Crowd(Ranks):
    """Ranks that begin every function alike, whatever they ran before, and have five minutes for it."""

    def __init__(self, num_ranks: int, *, gpus: Gpus = "own", among: "Crowds | None" = None) -> None:
        super().__init__(num_ranks, gpus=gpus)
        self._among, self.last_run = among, 0.0

    def run(self, fn: Callable[..., Any], *args: Any, timeout_seconds: float | None = 300) -> list[Any]:
        if self._among is not None:
            self._among.end_idle(self)
        try:
            return super().run(_afresh, are_untried(), fn, *args, timeout_seconds=timeout_seconds)
        finally:
            self.last_run = time.monotonic()


def _afresh(is_untried: bool, fn: Callable[..., Any], *args: Any) -> Any:
    # What was imported stays: to look through all of torch takes the collector 0.3 s of a core. To freeze again costs
    # nothing; to ask how much is frozen costs 35 ms, as all of it is counted.
    gc.freeze()
    # Set if a test of kernels was running when the ranks began.
    os.environ.pop("TRITON_INTERPRET", None)
    with settings_kept(), untried() if is_untried else nullcontext():
        torch.manual_seed(0)
        result = fn(*args)
    _end_what_is_left()
    return result


def _end_what_is_left() -> None:
    """End the groups and watches of engines that nobody closed, or that the collector has not found yet.

    A group has a thread that wakes up again and again. With a hundred groups a rank does little else.
    """
    dist.barrier()  # Nobody is in need of a group any more.
    for thread in threading.enumerate():
        watch = getattr(getattr(thread, "_target", None), "__self__", None)
        if isinstance(watch, Watch):
            watch.close()
    for group in [each for each in dist.distributed_c10d._world.pg_map if each is not dist.group.WORLD]:
        dist.destroy_process_group(group)
    gc.collect()


class Crowds:
    """Crowds by their number of ranks, each started when a test first wants so many."""

    def __init__(self) -> None:
        self._up: dict[int, Crowd] = {}

    def of(self, num_ranks: int) -> Crowd:
        return self._up.setdefault(num_ranks, Crowd(num_ranks, among=self))

    def end_idle(self, wanted: Crowd) -> None:
        """End the ranks that have had nothing to do for a while. When they are wanted again there are new ones."""
        for crowd in self._up.values():
            if crowd is not wanted and crowd.process_ids and time.monotonic() - crowd.last_run > _IDLE_SECONDS:
                crowd.close()

    def close(self) -> None:
        for crowd in self._up.values():
            crowd.close()
