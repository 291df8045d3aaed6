"""A schedule interpreted over stages, and what was recorded of it.

pipeline     plan, split -> the complete, proven schedule
                      |
local, process        walk the list: all ranks in one process, or one rank in a process of its own
                      |
interpreter           what each instruction means on one rank
  stage_io, backward, compute_policy     values between stages; two halves of a backward; recomputation
                      |
recording, trace_gather, memory_by_owner, device_clock     what happened, told by all ranks
"""
