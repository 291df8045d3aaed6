"""A module over several devices of one process. Read `place.py`, `moving.py` (the simple case), then `passage.py`."""

from shardwise.runtime.placing.place import place
from shardwise.runtime.placing.placed import Placed

__all__ = ["Placed", "place"]
