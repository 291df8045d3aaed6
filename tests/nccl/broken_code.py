"""Mistakes made in the library itself, on ranks that then record what they do: each is a patch of one place."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from shardwise.nccl.program import Program
from shardwise.parity.programs import record_on_rank
from shardwise.planner.plan import Plan
from shardwise.ranks import backend_exchange, collectives, links, mesh, outbox
from shardwise.ranks.exchange import Done
from shardwise.sharding.context import ring
from shardwise.sharding.expert.dispatch import Dispatch
from shardwise.states.buckets.gradients import ScatteredGradients
from shardwise.states.buckets.reducer import Reducer
from shardwise.states.buckets.step_gradients import UnusedParameters
from shardwise.states.buckets.weights import Weights
from shardwise.states.tiers.swapped_storage import Presence, SwappedStorage
from tests.parity.models import make_problem

#: What nobody answers for so long is never answered.
STALL_SECONDS = 4.0


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
        return record_on_rank(plan, make_problem(broken.model, plan), STALL_SECONDS)


def instead(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[int], Any]:
    """A patch on all ranks: what is there instead, given what was."""
    return lambda _: patch.object(owner, name, make(getattr(owner, name)))


def on_rank_1(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[int], Any]:
    original = getattr(owner, name)
    return lambda rank: patch.object(owner, name, make(original) if rank == 1 else original)


def _done_at_once(original: Any) -> Any:
    def gather(*args: Any, **kwargs: Any) -> Any:
        kept.append(original(*args, **kwargs))
        return Done()

    kept: list[Any] = []
    return gather


def _does_not_wait(original: Any) -> Any:
    """A `_started` whose wait does nothing."""

    def started(start: Any, group: Any) -> Any:
        wait = original(start, group)
        kept.append(wait)
        return lambda: None

    kept: list[Any] = []
    return started


def _unfinished(_: Any) -> Any:
    def finish(pending: Any) -> Any:
        kept.append(pending._work)
        return pending._result()

    kept: list[Any] = []
    return finish


def _keeps_nothing(original: Any) -> Any:
    def put(box: Any, sent: Any) -> None:
        box._sent.clear()
        original(box, sent)

    return put


def _gives_back_at_once(original: Any) -> Any:
    def summed(gradients: Any, lent: Any, *, is_first: bool) -> None:
        gradients._pool.give_back(lent)
        original(gradients, lent, is_first=is_first)

    return summed


def _frees_what_comes(original: Any) -> Any:
    def release(weights: Any) -> None:
        if weights.is_sharded and weights.presence is Presence.COMING:
            weights.whole.untyped_storage().resize_(0)
            weights.whole.untyped_storage().resize_(weights.whole_bytes)
        original(weights)

    return release


def _starts_and_lets_go(original: Any) -> Any:
    """Weights that are let go of while they are still on their way."""

    def wait(weights: Any) -> None:
        weights.start()
        if weights.presence is Presence.COMING:
            weights.release()
        original(weights)

    return wait


def _in_reverse(original: Any) -> Any:
    def made(reducer: Any, *args: Any, **kwargs: Any) -> None:
        original(reducer, *args, **kwargs)
        reducer._order = reducer._order[::-1]

    return made


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
        unused._asked = [(torch_flags(buckets, step), []) for _, buckets in groups]

    return start


def torch_flags(buckets: Any, step: int) -> Any:
    import torch

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

    def made(wanted: Any, pipelines: Any, *, device: Any, backend: str = "nccl") -> Any:
        del device
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
    "a gather of weights whose ticket waits for nothing": Broken(
        model="tied", plan="dp=2,zero=3", finds=("use", "freed", "unwaited"),
        patch=instead(backend_exchange.BackendExchange, "gather", _done_at_once),
    ),
    "sums over replicas that are started and not waited for": Broken(
        model="tied", plan="dp=2,zero=1,microbatches=2", finds=("use", "reuse", "unwaited"),
        patch=instead(backend_exchange, "_started", _does_not_wait),
    ),
    "collectives of layers whose result is taken at once": Broken(
        model="tied", plan="tp=2", finds=("use", "unwaited"), patch=instead(collectives.Pending, "finish", _unfinished)
    ),
    "a hop of the ring that is not waited for": Broken(
        model="tied", plan="cp=2", finds=("use", "unwaited"),
        patch=instead(ring._Hop, "finish", lambda _: lambda hop: hop._arrived),
    ),
    "a message that is read without a wait": Broken(
        model="tied", plan="pp=2,microbatches=2", finds=("use", "unwaited"),
        patch=instead(outbox.StreamWork, "wait", lambda _: lambda *_: None),
    ),
    "an outbox that keeps only the last message": Broken(
        model="tied", plan="pp=2,microbatches=2", finds=("freed", "unwaited"),
        patch=instead(outbox.StreamOutbox, "put", _keeps_nothing),
    ),
    "an outbox that is emptied without a wait": Broken(
        model="tied", plan="pp=2,microbatches=2", finds=("freed", "unwaited"),
        patch=instead(outbox.StreamOutbox, "drain", lambda _: lambda box: box._sent.clear()),
    ),
    "memory of gradients given back before they are summed": Broken(
        model="untied", plan="dp=2,zero=2,microbatches=2", finds=("reuse",),
        patch=instead(ScatteredGradients, "_sum", _gives_back_at_once),
    ),
    "weights freed while they are gathered": Broken(
        model="tied", plan="dp=2,zero=3", finds=("freed",), patch=instead(Weights, "release", _frees_what_comes)
    ),
    "weights from the host that are not followed": Broken(
        model="tied", plan="cp=2,zero=2,offload.parameters=1,offload.optimizer=1", finds=("use", "reuse"),
        patch=instead(SwappedStorage, "follow", lambda own: _not_followed(own)),
    ),
    "links that are not connected before the first step": Broken(
        model="tied", plan="pp=2,schedule=dualpipe,microbatches=4", finds=("circle",), patch=_unconnected
    ),
    "buckets that one rank sums in another order": Broken(
        model="untied", plan="dp=2,zero=1,microbatches=2", finds=("size", "order"),
        patch=on_rank_1(Reducer, "__init__", _in_reverse), stalls=True,
    ),
    "groups of the mesh that one rank makes in another order": Broken(
        model="tied", plan="dp=2,tp=2,sp=true,zero=1", finds=("groups",),
        patch=on_rank_1(mesh, "_make_groups", _last_first), stalls=True,
    ),
    "rows for experts that one rank sends to a wrong one": Broken(
        model="experts", plan="dp=2,ep=2", finds=("size",),
        patch=on_rank_1(Dispatch, "_agree", _one_row_more), stalls=True,
    ),
    "a sum of flags that one rank leaves out": Broken(
        model="tied", plan="dp=2,zero=1,microbatches=2", finds=("missing", "order", "size"),
        patch=on_rank_1(UnusedParameters, "start", _asks_nobody), stalls=True,
    ),
    "a sum that one rank makes in bf16": Broken(
        model="tied", plan="dp=2,zero=1,microbatches=2", finds=("type",),
        patch=on_rank_1(backend_exchange.BackendExchange, "sum_to_all", _in_halves), stalls=True,
    ),
}  # fmt: skip


def _not_followed(original: Any) -> Any:
    """A storage that is taken to be here as soon as its copy is under way. Its thread is awaited, unseen."""

    def follow(storage: Any) -> None:
        copies, arrives = storage._copies, None
        storage.start()
        arrives, storage._arrives = storage._arrives, None
        if arrives is not None:
            unseen(copies, arrives)
        original(storage)

    def unseen(copies: Any, event: Any) -> None:
        del copies
        stream = event.stream
        stream.wait(event)

    return follow
