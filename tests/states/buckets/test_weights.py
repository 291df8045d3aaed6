"""The weights of a bucket that come and go: they are here as long as somebody holds them."""

import torch
from torch import nn

from shardwise.ranks.collectives import Group
from shardwise.ranks.cpu_exchange import CpuExchange
from shardwise.ranks.mesh import Replicas
from shardwise.states.buckets.flat_layout import BucketSpec, FlatLayout
from shardwise.states.buckets.weights import Weights


def test_gathered_weights_stay_until_the_last_of_their_holders_lets_go() -> None:
    parameter = nn.Parameter(torch.arange(6.0).view(2, 3))
    layout = FlatLayout.of([("weight", parameter.shape)], torch.float32, 1)
    replicas = Replicas(shard=Group())
    spec = BucketSpec(layout=layout, parameters=[parameter], replicas=replicas, exchange=CpuExchange())
    weights = Weights(spec, is_sharded=True)
    own_bytes = weights.num_bytes
    weights.hold("a stage")
    weights.hold("another")
    weights.let_go("a stage")
    assert weights.num_bytes == own_bytes + weights.whole_bytes
    assert torch.equal(parameter.detach(), torch.arange(6.0).view(2, 3))
    weights.let_go("another")
    assert weights.num_bytes == own_bytes
