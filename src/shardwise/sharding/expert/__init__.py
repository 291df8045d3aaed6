"""Expert parallelism: experts sharded over ranks, and tokens dispatched to them."""

from shardwise.sharding.expert.move import move, rebalance
from shardwise.sharding.expert.placement import Placement, balanced
from shardwise.sharding.expert.shard import shard_experts
from shardwise.sharding.expert.sharding import ExpertSharding

__all__ = ["ExpertSharding", "Placement", "balanced", "move", "rebalance", "shard_experts"]
