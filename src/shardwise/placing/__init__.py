"""A module over several devices of one process.

Read `place.py`, `moving.py` (the simple case), then `microbatch_pass.py`.
"""

from shardwise.placing.place import place
from shardwise.placing.placed import Placed

__all__ = ["Placed", "place"]
