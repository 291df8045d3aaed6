"""Tensor parallelism: layers cut over ranks that compute them together."""

from shardwise.sharding.tensor.shard import shard
from shardwise.sharding.tensor.sharding import Sharding, Shards, find_trackers
from shardwise.sharding.tensor.torch_encoders import layers_called
from shardwise.sharding.tensor.trial import ByFirst

__all__ = ["ByFirst", "Sharding", "Shards", "find_trackers", "layers_called", "shard"]
