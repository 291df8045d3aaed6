"""Mistakes made in the library itself, on ranks that then record what they do: each is a patch of one place."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from shardwise.nccl.program import Program
from shardwise.parity.programs import record_on_rank
from shardwise.planner.plan import Plan
from shardwise.ranks import backend_exchange, collectives, links, mesh, outbox
from shardwise.sharding.context import ring
from shardwise.sharding.expert.dispatch import Dispatch
from shardwise.states.buckets.gradients import ScatteredGradients
from shardwise.states.buckets.reducer import Reducer
from shardwise.states.buckets.step_gradients import UnusedParameters
from shardwise.states.buckets.weights import Weights
from shardwise.states.tiers.copy_streams import CopyStreams
from shardwise.states.tiers.swapped_storage import SwappedStorage
from tests.nccl.short import make_short

#: Where ranks stand still, what nobody answers for so long is never answered. Elsewhere a busy machine has time.
_STALL_SECONDS, _ANY_SECONDS = 6.0, 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """`finds` are the kinds of problem of which at least one must be told.

    `stalls`: ranks stand still until the limit.
    """

    model: str
    plan: str
    finds: tuple[str, ...]
    patch: Callable[[int], Any]
    stalls: bool = False


def record_broken(name: str) -> Program:
    """What this rank does with a mistake in the library."""
    broken = BROKEN[name]
    plan = Plan.parse(broken.plan)
    with broken.patch(dist.get_rank()):
        limit = _STALL_SECONDS if broken.stalls else _ANY_SECONDS
        return record_on_rank(plan, make_short(broken.model, plan), limit)


def instead(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[int], Any]:
    """A patch on all ranks: what is there instead, given what was."""
    return lambda _: patch.object(owner, name, make(getattr(owner, name)))


def on_rank_1(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[int], Any]:
    original = getattr(owner, name)
    return lambda rank: patch.object(owner, name, make(original) if rank == 1 else original)


def unseen(work: Any) -> None:
    """Wait for work without its being noted: the mistake is on paper, and what is computed is what it was."""
    for each in work._works:
        each.wait()


def _gathers_and_forgets(_: Any) -> Any:
    def start(exchange: Any, flat: Any, shard: Any, group: Any, channel: int) -> Any:
        del exchange, channel
        unseen(collectives.all_gather_single(flat, shard, group=group.handle, async_op=True))
        return lambda: None

    return start


def _starts_and_forgets(_: Any) -> Any:
    def started(exchange: Any, start: Any, group: Any) -> Any:
        del exchange
        unseen(start(group.handle))
        return lambda: None

    return started


def _unfinished(_: Any) -> Any:
    def finish(pending: Any) -> Any:
        if pending._work is not None:
            unseen(pending._work)
        return pending._result()

    return finish


def _arrives_unseen(_: Any) -> Any:
    def finish(hop: Any) -> Any:
        for work in hop._works:
            unseen(work)
        return hop._arrived

    return finish


def _keeps_nothing(original: Any) -> Any:
    def put(box: Any, sent: Any) -> None:
        _emptied(box)
        original(box, sent)

    return put


def _emptied(box: Any) -> None:
    """An outbox lets go of all that it keeps. It has left, unseen: gloo must not send what is freed."""
    while box._sent:
        unseen(box._sent.popleft().work)


def _gives_back_at_once(original: Any) -> Any:
    def summed(gradients: Any, lent: Any, *, is_first: bool) -> None:
        gradients._pool.give_back(lent)
        original(gradients, lent, is_first=is_first)

    return summed


def _frees_what_comes(original: Any) -> Any:
    """Memory taken anew while a gather writes to it, with the same numbers in the end."""

    def bring(weights: Any) -> Any:
        ticket = original(weights)
        kept_by = [each.cell_contents for each in ticket._wait.__closure__] if hasattr(ticket, "_wait") else []
        work = next((each for each in kept_by if hasattr(each, "_works")), None)
        if work is not None and weights.is_sharded:
            unseen(work)
            kept = weights.whole.detach().numpy().copy()
            for size in (0, weights.whole_bytes):
                weights.whole.untyped_storage().resize_(size)
            weights.whole.copy_(torch.from_numpy(kept))
        return ticket

    return bring


def _in_reverse(original: Any) -> Any:
    def begin(reducer: Any, instruction: Any) -> None:
        original(reducer, instruction)
        reducer._queue.reverse()

    return begin


def _last_first(original: Any) -> Any:
    def groups(parts: Any, rank: int) -> Any:
        return original(dict(reversed(parts.items())), rank)

    return groups


def _one_row_more(original: Any) -> Any:
    def agree(dispatch: Any, counts: Any) -> Any:
        there, sent, received = original(dispatch, counts)
        return there, [sent[0] + 1, sent[1] - 1] if sent[1] else [sent[0] - 1, sent[1] + 1], received

    return agree


def _asks_nobody(original: Any) -> Any:
    def start(unused: Any, step: int) -> None:
        groups, unused._groups = unused._groups, []
        original(unused, step)
        unused._groups = groups
        unused._asked = [(_flags(buckets, step), []) for _, buckets in groups]

    return start


def _flags(buckets: Any, step: int) -> Any:
    return torch.ones(sum(len(bucket.trained.pop_used(step)) for bucket in buckets))


def _in_halves(original: Any) -> Any:
    """A sum of flags in half precision."""

    def summed(exchange: Any, flat: Any, group: Any, channel: int, *, follows: bool = False) -> Any:
        if flat.numel() < 64:
            flat = flat.bfloat16()
        return original(exchange, flat, group, channel, follows=follows)

    return summed


@contextmanager
def _unconnected(_: int) -> Iterator[None]:
    """Links are made, and nothing is sent over them before the first step."""

    def made(wanted: Any, pipelines: Any, *, device: Any, watch: Any = None, backend: str = "nccl") -> Any:
        del device, watch
        me, found = dist.get_rank(), {}
        for link in sorted(set(wanted)):
            for ranks in pipelines:
                ends = [ranks[rank] for rank in link]
                group = dist.new_group(ends, backend=backend)
                if me in ends:
                    found[link] = group
        return found

    with patch("shardwise.ranks.wires.make_links", made), patch.object(links, "make_links", made):
        yield


BROKEN: dict[str, Broken] = {
    "a gather of weights whose wait does nothing": Broken(
        model="tied", plan="dp=2,zero=3", finds=("use", "freed"),
        patch=instead(backend_exchange.BackendExchange, "_start_gather", _gathers_and_forgets),
    ),
    "reductions over replicas that are started and not waited for": Broken(
        model="tied", plan="dp=2,zero=1,microbatches=2", finds=("use", "reuse", "unwaited"),
        patch=instead(backend_exchange.BackendExchange, "_started", _starts_and_forgets),
    ),
    "collectives of layers whose result is used without a wait": Broken(
        model="tied", plan="tp=2", finds=("use", "unwaited"), patch=instead(collectives.Pending, "finish", _unfinished)
    ),
    "a hop of the ring that is not waited for": Broken(
        model="tied", plan="cp=2", finds=("use", "unwaited"),
        patch=instead(ring._Hop, "finish", _arrives_unseen),
    ),
    "a message that is read without a wait": Broken(
        model="tied", plan="pp=2,microbatches=2", finds=("use", "unwaited"),
        patch=instead(outbox.StreamWork, "wait", lambda _: lambda work, *_: unseen(work._work)),
    ),
    "an outbox that keeps only the last message": Broken(
        model="tied", plan="pp=2,microbatches=2", finds=("freed", "unwaited"),
        patch=instead(outbox.StreamOutbox, "put", _keeps_nothing),
    ),
    "an outbox that is emptied without a wait": Broken(
        model="tied", plan="pp=2,microbatches=2", finds=("freed", "unwaited"),
        patch=instead(outbox.StreamOutbox, "drain", lambda _: _emptied),
    ),
    "memory of gradients released before they are reduced": Broken(
        model="untied", plan="dp=2,zero=2,microbatches=2", finds=("reuse",),
        patch=instead(ScatteredGradients, "_sum", _gives_back_at_once),
    ),
    "weights freed while they are gathered": Broken(
        model="tied", plan="dp=2,zero=3", finds=("freed",), patch=instead(Weights, "_bring", _frees_what_comes)
    ),
    "weights from the host whose copy is not waited for": Broken(
        model="tied", plan="cp=2,zero=2,offload.parameters=1,offload.optimizer=1", finds=("use", "reuse"),
        patch=instead(SwappedStorage, "follow", lambda own: _not_followed(own)),
    ),
    "weights from the host that come into memory still in use": Broken(
        model="tied", plan="cp=2,zero=2,offload.parameters=1,offload.optimizer=1", finds=("reuse",),
        patch=instead(SwappedStorage, "_start", lambda own: lambda storage, fetch: own(storage, lambda _: fetch(()))),
    ),
    "values copied to the host before they are computed": Broken(
        model="tied", plan="dp=2,offload.activations=1", finds=("reuse",),
        patch=instead(CopyStreams, "to_host", lambda _: CopyStreams.to_host_after),
    ),
    "links that are not connected before the first step": Broken(
        model="tied", plan="pp=2,schedule=dualpipe,microbatches=4", finds=("circle",), patch=_unconnected
    ),
    "buckets that one rank reduces in another order": Broken(
        model="tied", plan="dp=2,zero=3", finds=("size", "order"),
        patch=on_rank_1(Reducer, "begin", _in_reverse), stalls=True,
    ),
    "groups of the mesh that one rank creates in another order": Broken(
        model="tied", plan="dp=2,tp=2,sp=true,zero=1", finds=("groups",),
        patch=on_rank_1(mesh, "_make_groups", _last_first), stalls=True,
    ),
    "rows for experts that one rank sends to the wrong rank": Broken(
        model="experts", plan="dp=2,ep=2", finds=("size",),
        patch=on_rank_1(Dispatch, "_agree", _one_row_more), stalls=True,
    ),
    "an all-reduce of flags that one rank leaves out": Broken(
        model="tied", plan="dp=2,zero=1,microbatches=2", finds=("missing", "order", "size"),
        patch=on_rank_1(UnusedParameters, "start", _asks_nobody), stalls=True,
    ),
    "an all-reduce that one rank makes in bf16": Broken(
        model="tied", plan="dp=2,zero=1,microbatches=2", finds=("type",),
        patch=on_rank_1(backend_exchange.BackendExchange, "sum_to_all", _in_halves), stalls=True,
    ),
}  # fmt: skip


def _not_followed(original: Any) -> Any:
    """A storage that is taken to be here as soon as its copy is under way. Its thread is awaited, unseen."""

    def follow(storage: Any) -> None:
        storage.start()
        arrives, storage._arrives = storage._arrives, None
        if arrives is not None:
            wait_unseen(arrives)
        original(storage)

    def wait_unseen(event: Any) -> None:
        event.stream.wait(event)

    return follow
