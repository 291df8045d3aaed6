"""Tensor parallelism: layers cut over ranks that compute them together."""

from shardwise.sharding.tensor.shard import shard
from shardwise.sharding.tensor.sharding import Sharding

__all__ = ["Sharding", "shard"]
