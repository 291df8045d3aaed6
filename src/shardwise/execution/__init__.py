"""Interpret a schedule over the stages of a module, and record the step as a trace.

pipeline     plan, split -> the complete, verified schedule
                      |
executor              the part of each rank's list that one batch allows to run
local, process        walk the list: all ranks in one process, or one rank per process
                      |
interpreter           the meaning of each instruction on one rank
  stage_io, backward, compute_policy     values between stages; the two halves of a backward; recomputation
                      |
recording             the trace of a step, merged from all ranks
"""
