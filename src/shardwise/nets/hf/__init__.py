"""Read and write Hugging Face folders. Start with `family.py` and `naming.py`; `load.py` and `save.py` use both."""

from shardwise.nets.hf.checkpoint import Checkpoint
from shardwise.nets.hf.load import load, load_model
from shardwise.nets.hf.save import save

__all__ = ["Checkpoint", "load", "load_model", "save"]
