"""Weights of a bucket on the host: where the newest numbers come from, line by line of the table."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.dataflow.deferred_free import DeferredFree
from shardwise.ranks.mesh import Replicas
from shardwise.states.buckets.flat_layout import BucketSpec, FlatLayout
from shardwise.states.buckets.offloaded_weights import OffloadedShards, OffloadedWhole, Source
from shardwise.states.tiers.swapped_storage import Presence
from tests.states.tiers.late import LateCopyStreams

#: What this rank, the first of two, has and updates, and what the other one has.
OWN, OTHER = [1.0, 2.0], [7.0, 8.0]


@dataclass
class TwoRanks:
    size: int = 2
    rank: int = 0


class Peers:
    """An exchange in which the other rank's pieces are always the same, and come when they are waited for."""

    def __init__(self) -> None:
        self.gathered = 0

    def gather(self, flat: Tensor, shard: Tensor, *_: object, **__: object) -> Any:
        self.gathered += 1
        own = shard.clone()

        class Ticket:
            def wait(self) -> None:
                flat.copy_(torch.cat([own, torch.tensor(OTHER, dtype=own.dtype)]))

        return Ticket()


def make(kind: Any, dtype: torch.dtype, *, has_master: bool, seed: int) -> tuple[Any, Peers, LateCopyStreams]:
    parameter, peers, copies = nn.Parameter(torch.tensor(OWN + OTHER, dtype=dtype)), Peers(), LateCopyStreams(seed)
    layout = FlatLayout.of([("a", parameter.shape)], dtype, 2)
    group: Any = TwoRanks()
    exchange: Any = peers
    spec = BucketSpec(layout=layout, parameters=[parameter], replicas=Replicas(shard=group), exchange=exchange)
    weights = kind(spec, is_sharded=kind is OffloadedShards)
    own = weights.shard
    weights.move_in(copies, DeferredFree(0), own.float() if has_master else None)
    return weights, peers, copies


def update(weights: Any, copies: LateCopyStreams, numbers: list[float]) -> None:
    """A step: what this rank updates is new on the host."""
    home = weights.master.host if weights.master is not None else weights.kept[:2]
    weights.is_renewed([copies.to_host_after(home, torch.tensor(numbers, dtype=home.dtype))])
    weights.expire()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("has_master", [False, True])
def test_after_a_step_own_numbers_come_from_the_host_or_the_master_and_others_from_peers(
    has_master: bool, seed: int
) -> None:
    dtype = torch.bfloat16 if has_master else torch.float32
    weights, peers, copies = make(OffloadedWhole, dtype, has_master=has_master, seed=seed)
    newest = Source.MASTER if has_master else Source.HOST
    assert (weights.own_source, weights.others_source, weights.presence) == (Source.HOST, Source.HOST, Presence.AWAY)
    weights.hold("unit")
    assert (weights.presence, peers.gathered) == (Presence.HERE, 0)
    for number in (3.0, 4.0):
        update(weights, copies, [number, number])
        assert (weights.own_source, weights.others_source) == (newest, Source.PEERS)
        presences = [weights.presence]
        weights.start()
        assert [*presences, weights.presence] == [Presence.AWAY, Presence.COMING]
        weights.hold("unit")
        assert weights.whole.tolist() == [number, number, *OTHER]
        assert (weights.own_source, weights.others_source) == (Source.HOST, Source.HOST)
        weights.let_go("unit")
        assert (weights.presence, weights.num_bytes) == (Presence.AWAY, 0)
        weights.hold("again")
        assert weights.whole.tolist() == [number, number, *OTHER], "all of it comes from the host"
    assert peers.gathered == 2
    weights.settle()
    assert weights.kept.tolist() == [4.0, 4.0, *OTHER]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("has_master", [False, True])
def test_shards_are_gathered_for_every_use(has_master: bool, seed: int) -> None:
    dtype = torch.bfloat16 if has_master else torch.float32
    weights, peers, copies = make(OffloadedShards, dtype, has_master=has_master, seed=seed)
    for number in (3.0, 4.0):
        update(weights, copies, [number, number])
        for _ in range(2):
            weights.fetch()
            assert weights.presence is Presence.AWAY
            weights.hold("unit")
            assert weights.whole.tolist() == [number, number, *OTHER]
            weights.let_go("unit")
            assert (weights.presence, weights.num_bytes) == (Presence.AWAY, 0)
    assert peers.gathered == 4
