"""Whether a model can be split as a plan says: asked before a server is submitted to other machines."""

from pathlib import Path

import torch

from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.serving.shards import Shard, check_shard
from shardwise.serving.sources import find_shape


def check_plan(source: str, plan: Plan, *, random_weights: bool) -> None:
    """Refuse heads, layers or experts that ranks cannot share. A model that cannot be read here is not looked at."""
    if not random_weights and not Path(source).is_dir():
        return
    try:
        shape = find_shape(source, random_weights=random_weights, dtype=None, device=torch.device("cpu"))
    except ShardwiseError:
        return
    if shape is not None:
        check_shard(shape[0], Shard(tp=plan.tp, pp=plan.pp, ep=plan.ep, counts=plan.layers))
