"""Split an unmodified module into stages. Read `split.py` first: it has all steps in order."""

from shardwise.stages.split.materialise import materialise
from shardwise.stages.split.split import split, stage_costs

__all__ = ["materialise", "split", "stage_costs"]
