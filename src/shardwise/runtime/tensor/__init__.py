"""Tensor parallelism: layers cut over ranks that compute them together."""

from shardwise.runtime.tensor.shard import shard
from shardwise.runtime.tensor.sharding import Sharding

__all__ = ["Sharding", "shard"]
