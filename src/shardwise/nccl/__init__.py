"""The operations that ranks issue to NCCL, recorded on any machine and proven to terminate: `shardwise check --nccl`.

taps, copies, touches                    calls of process groups, copies, and memory that is read, written and freed
         |
recorder                                 the record of one rank: a `Program`
         |
program                                  the value; a checker needs nothing else, and no torch
         |
check ---- matching, circles, races      do operations match; do they terminate; is no memory used too early
"""
