"""The injection of each fault of `faults.py` into an engine. All ranks call these, and those of the first stage break.

They use private attributes of engines, which no other code may.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from shardwise.engine.engine import Engine
from shardwise.execution.step_losses import Tally
from shardwise.ranks.collectives import Group
from shardwise.ranks.cpu_exchange import CpuExchange
from shardwise.ranks.exchange import Done, Exchange, Then, Ticket
from shardwise.sharding.context.sequence_shards import Entry
from shardwise.sharding.tensor.linear import ColumnParallelLinear
from shardwise.sharding.tensor.vocabulary import VocabularyHead
from shardwise.states.buckets.bucket import Bucket
from shardwise.states.buckets.flat_layout import Slot
from shardwise.states.buckets.weights import Weights


def unscale(engine: Engine) -> None:
    """Leave gradients as sums: the step gets a count of one."""
    own = engine.states.update.take

    def take(tally: Tally) -> None:
        own(Tally(total=tally.total, count=1.0))

    engine.states.update.take = take  # type: ignore[method-assign]
    if engine.states.stream is not None:
        engine.states.stream._update = take


def forget_a_sum(engine: Engine) -> None:
    """Omit the reduction of one gradient over replicas; else one over tensor parallel ranks, or over tied stages."""
    if engine.plan.num_ranks == engine.plan.pp:
        for bucket in engine.states.data.buckets:
            if bucket.local is not None:
                bucket.local._exchange = _Mute()
        return
    if engine.plan.dp * engine.plan.cp > 1:
        bucket, slot = _some_matrix(engine)
        if engine.wires.ranks[0] == 0:
            bucket.trained._exchange = _Deaf(bucket.trained._exchange, bucket, slot)
        return
    sharding = engine.sharded.tensor
    assert sharding is not None, "there are tensor parallel ranks"
    partial = [name for name in engine.parameters if sharding.of(name).is_partial]
    if partial and engine.wires.ranks[0] == 0:
        # Partial sums of its gradient are used as the whole sum.
        unsummed = replace(sharding.of(partial[-1]), is_partial=False)
        sharding.shards = {**sharding.shards, partial[-1]: unsummed}
    elif engine.wires.ranks[0] == 0:
        columns = [each for each in engine.module.modules() if isinstance(each, ColumnParallelLinear)]
        chosen = next(each for each in columns if not each.weight.is_meta and not isinstance(each, VocabularyHead))
        chosen.together.reduces = False


def swap(engine: Engine) -> None:
    """Give each rank its neighbour's piece: of a layer (tp), of experts (ep), or of a bucket (ZeRO)."""
    state = engine.state_dict()
    tensor, experts = engine.sharded.tensor, engine.sharded.experts
    found: dict[str, Tensor] = {}
    if tensor is not None:
        for name, parameter in engine.parameters.items():
            shards = tensor.of(name)
            if shards.dim is not None and len({shards.length(rank) for rank in range(tensor.group.size)}) == 1:
                piece = shards.local(state[name], (tensor.group.rank + 1) % tensor.group.size)
                if piece.shape == parameter.shape:
                    found = {name: piece.clone()}
                    break
    elif experts is not None and experts.parameters:
        for name in [each for each in experts.parameters if each in engine.parameters][:1]:
            ranks = experts.layers[experts.parameters[name]].placement.ranks
            theirs = ranks[(experts.group.rank + 1) % experts.group.size]
            found = {name: state[name][list(theirs)].clone()}
    else:
        _swap_buckets(engine)
        return
    engine.states.data.load(found if engine.wires.ranks[0] == 0 else {})


@torch.no_grad()
def _swap_buckets(engine: Engine) -> None:
    bucket, _ = _some_matrix(engine)
    if engine.wires.ranks[0]:
        return
    bucket.weights.hold("swap")
    pieces = bucket.weights.whole.view(bucket.sharing.size, -1)
    theirs = pieces[(bucket.sharing.rank + 1) % bucket.sharing.size].clone()
    bucket.weights.let_go("swap")
    bucket.kept.copy_(theirs)
    bucket.take_back()


def unmask(engine: Engine) -> None:
    """Treat the padding of a vocabulary as words, or else the padding of sequences as tokens."""
    heads = [each for each in engine.module.modules() if isinstance(each, VocabularyHead)]
    padded = [each for each in heads if each.words % each.together.group.size]
    for head in padded:
        head.words = -(-head.words // head.together.group.size) * head.together.group.size
    if not padded and engine.sharded.context is not None:
        sharding = engine.sharded.context._sharding
        counted = {name: Entry(fill=0, ignores=True) for name in ("labels", "shift_labels")}
        engine.sharded.context._sharding = replace(sharding, entries={**sharding.entries, **counted})


def keep_stale(engine: Engine) -> None:
    """Let one bucket keep the weights of other ranks that it gathered first."""
    bucket, _ = _some_matrix(engine)
    if engine.wires.ranks[0] == 0:
        bucket.weights.wait = _Stale(bucket.weights, bucket.sharing)  # type: ignore[method-assign]


def _some_matrix(engine: Engine) -> tuple[Bucket, Slot]:
    """Return a matrix in the middle of this rank's stages that replicas share, but no other stage."""
    shared = [
        (bucket, slot)
        for bucket in engine.states.data.buckets
        for slot in bucket.layout.slots
        if bucket.gradients is not None and bucket.key.tie is None and bucket.key.replicas.count > 1
    ]
    matrices = [each for each in shared if len(each[1].shape) > 1] or shared
    return matrices[len(matrices) // 2]


class _Deaf:
    """An exchange in which one parameter of a bucket stays what it is on this rank."""

    def __init__(self, exchange: Exchange, bucket: Bucket, slot: Slot) -> None:
        self._exchange, self._length, self._slot = exchange, bucket.layout.length, slot

    def sum_to_shards(self, flat: Tensor, group: Group, channel: int, then: Then | None = None) -> Ticket:
        restore = self._restorer(flat)

        def after() -> None:
            restore()
            if then is not None:
                then()

        return self._exchange.sum_to_shards(flat, group, channel, after)

    def sum_to_all(self, flat: Tensor, group: Group, channel: int, *, follows: bool = False) -> Ticket:
        restore = self._restorer(flat)
        return _Afterwards(self._exchange.sum_to_all(flat, group, channel, follows=follows), restore)

    def gather(self, flat: Tensor, shard: Tensor, group: Group, channel: int, *, lends: bool = False) -> Ticket:
        return self._exchange.gather(flat, shard, group, channel, lends=lends)

    def settle(self) -> None:
        self._exchange.settle()

    def close(self) -> None:
        self._exchange.close()

    def _restorer(self, flat: Tensor) -> Callable[[], None]:
        if flat.numel() != self._length:
            return lambda: None  # A shard, which the sum before has made.
        place = flat[self._slot.start : self._slot.stop]
        before = place.clone()

        def restore() -> None:
            place.copy_(before)

        return restore


class _Mute(CpuExchange):
    """An exchange in which every rank takes its own numbers for the sum."""

    def sum_to_all(self, flat: Tensor, group: Group, channel: int, *, follows: bool = False) -> Ticket:  # noqa: ARG002
        return Done()


class _Afterwards:
    """A ticket after which something is done, once."""

    def __init__(self, ticket: Ticket, then: Then) -> None:
        self._ticket, self._then = ticket, then

    def wait(self) -> None:
        self._ticket.wait()
        self._then()


class _Stale:
    """Waits for weights; and puts back what was there the first time, but for this rank's own piece."""

    def __init__(self, weights: Weights, sharing: Group) -> None:
        self._weights, self._sharing, self._own = weights, sharing, weights.wait
        self._first: Tensor | None = None

    def __call__(self) -> None:
        self._own()
        pieces = self._weights.whole.view(self._sharing.size, -1)
        if self._first is None:
            self._first = pieces.clone()
        for rank, piece in enumerate(pieces):
            if rank != self._sharing.rank:
                piece.copy_(self._first[rank])
