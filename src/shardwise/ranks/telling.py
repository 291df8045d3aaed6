"""Report an error of one rank to the others, so that none waits for it; and gather objects from all ranks.

If one rank raises alone, the others would block at their next wait for it. So everything that all ranks do together
runs inside `telling`, over groups that the watch guards.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from shardwise.errors import ShardwiseError
from shardwise.ranks import objects
from shardwise.ranks.faults import LIMIT_SECONDS, Watch
from shardwise.ranks.worker import join_if_launched


def find_watch(name: str = "pipeline", limit_seconds: float = LIMIT_SECONDS) -> Watch | None:
    """A new watch of this process, if it is one of several. All of them make it alike."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return Watch(dist.get_rank(), dist.get_world_size(), limit_seconds=limit_seconds, name=name)


@contextmanager
def telling(watch: Watch | None, *, refusals: bool = True) -> Iterator[None]:
    """The others are told of an error before it goes on to the caller, and then all that the watch guards is over.

    Without `refusals` those are not told as long as all ranks refuse: then what they share can be used on. One that
    refuses alone would leave the others waiting, and is told.
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
    """Within it ranks make something together, before there is anything else that connects them: nobody waits for one
    that has failed. Gives the watch of it, if this process is one of several: a new one, or that of what is `shared`
    with others, over which a refusal ends nothing. Under `torchrun` the processes are joined first."""
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
    """This watch; or one for the while, which tells what goes wrong."""
    if watch is not None:
        yield watch
        return
    own = Watch(dist.get_rank(), dist.get_world_size(), name="for the while")
    try:
        with telling(own):
            yield own
    finally:
        own.close()


def gather_objects(given: Any, group: dist.ProcessGroup, watch: Watch, what: str) -> list[Any]:
    """What each rank of a group gives. The watch guards the group: its error ends the wait."""
    watch.at(what)
    try:
        return objects.gather(given, group)
    except RuntimeError as error:
        watch.explain(error)


def wait_patiently(work: Any, watch: Watch, what: str) -> None:
    """Wait for work of a group that the watch guards. Whoever comes late, and lives, may have much to do before."""
    watch.at(what)
    try:
        work.wait()
    except RuntimeError as error:
        watch.explain(error)
