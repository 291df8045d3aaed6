"""An unmodified module in stages. Read `split.py` first: it is the whole story in the order in which it happens."""

from shardwise.stages.split.materialise import materialise
from shardwise.stages.split.split import split, stage_costs

__all__ = ["materialise", "split", "stage_costs"]
