"""A schedule interpreted over stages, and what was recorded of it.

pipeline     plan, split -> the complete, proven schedule
                      |
executor              with each batch, as much of the list as it lets run
local, process        walk it: all ranks in one process, or one rank in a process of its own
                      |
interpreter           what each instruction means on one rank
  stage_io, backward, compute_policy     values between stages; two halves of a backward; recomputation
                      |
recording             what happened, told by all ranks
"""
