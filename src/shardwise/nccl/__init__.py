"""What ranks ask of NCCL, recorded on any machine, and proven to end: `shardwise check --nccl`.

taps, copies, touches                    what is asked of groups, what is copied, what is read, written and freed
         |
recorder                                 what one rank did: a `Program`
         |
program                                  the value; a checker needs nothing else, and no torch
         |
check ---- matching, circles, races      do all ranks ask for the same; can it end; is no memory used too early
"""
