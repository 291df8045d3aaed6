"""Expert parallelism: experts shared out over ranks, and tokens that travel to them."""

from shardwise.runtime.expert.move import move, rebalance
from shardwise.runtime.expert.placement import Placement, balanced
from shardwise.runtime.expert.shard import shard_experts
from shardwise.runtime.expert.sharding import ExpertSharding

__all__ = ["ExpertSharding", "Placement", "balanced", "move", "rebalance", "shard_experts"]
