"""Report an error of one rank to the others, so that none waits for it; and gather objects from all ranks.

If one rank raises alone, the others would block at their next wait for it. So everything that all ranks do together
runs inside `telling`, over groups that the watch guards.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist

from shardwise.errors import ShardwiseError
from shardwise.ranks import objects
from shardwise.ranks.faults import LIMIT_SECONDS, Watch
from shardwise.ranks.worker import join_if_launched


def find_watch(name: str = "pipeline", limit_seconds: float = LIMIT_SECONDS) -> Watch | None:
    """Return a new watch of this process, or None if it is the only one. All processes call this alike."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return Watch(dist.get_rank(), dist.get_world_size(), limit_seconds=limit_seconds, name=name)


@contextmanager
def telling(watch: Watch | None, *, refusals: bool = True) -> Iterator[None]:
    """Report an error to the other ranks before it is re-raised. Everything that the watch guards then ends.

    Without `refusals`, a `ShardwiseError` that all ranks raise is not reported, so what they share stays usable. If
    only some ranks refuse, the others would wait for them, so the error is reported.
    """
    try:
        yield
    except BaseException as error:
        is_refusal = isinstance(error, ShardwiseError) and not refusals
        if watch is not None and not (is_refusal and watch.all_refuse()):
            watch.fail(error)
        raise


@contextmanager
def making(shared: Watch | None, limit_seconds: float | None = None) -> Iterator[Watch | None]:
    """Guard ranks that build something together before anything else connects them: none waits for a failed rank.
    Yield the watch, or None for a single process. The watch is new, or `shared` with others: then a refusal by all
    ranks ends nothing. Under `torchrun`, join the processes first."""
    join_if_launched()
    watch = shared or find_watch(limit_seconds=limit_seconds or LIMIT_SECONDS)
    try:
        with telling(watch, refusals=shared is None):
            yield watch
    except BaseException:
        if shared is None and watch is not None:
            watch.close()
        raise


@contextmanager
def watched(watch: Watch | None) -> Iterator[Watch]:
    """Yield this watch, or a temporary one that reports errors to the other ranks."""
    if watch is not None:
        yield watch
        return
    own = Watch(dist.get_rank(), dist.get_world_size(), name="for the while")
    try:
        with telling(own):
            yield own
    finally:
        own.close()


def others_of(group: dist.ProcessGroup) -> list[int]:
    """Return the other ranks of a group, as ranks of the world."""
    return [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]


def gather_objects(
    given: Any, group: dist.ProcessGroup, watch: Watch, what: str, *, patience: float | None = None
) -> list[Any]:
    """Gather an object from each rank of a group. The watch guards the group: its error ends the wait.

    A rank that is late but alive may have much work before it. With a `patience`, it is named after that many times
    the limit.
    """
    watch.at(what)
    try:
        with nullcontext() if patience is None else watch.asking(*others_of(group), patience=patience):
            return objects.gather(given, group)
    except RuntimeError as error:
        watch.explain(error)


def wait_patiently(work: Any, watch: Watch, what: str) -> None:
    """Wait for work of a group that the watch guards. A rank that is late but alive may have much work before it."""
    watch.at(what)
    try:
        work.wait()
    except RuntimeError as error:
        watch.explain(error)
