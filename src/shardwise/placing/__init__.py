"""A module over several devices of one process.

place, placed     a module, and what is used like it
      |
arrange, layout   what lives on which place, by room and speed (loads, host, offload_planner)
      |
moving            layer by layer: inputs follow their weights
pipeline          in microbatches: batch_rows -> told_outputs (tried_outputs) -> microbatch_pass
      |
rng_state, activation_offload    random numbers of a stage; activations on the host
"""

from shardwise.placing.place import place
from shardwise.placing.placed import Placed

__all__ = ["Placed", "place"]
