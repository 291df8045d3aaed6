"""Where weights, gradients and optimizer state live (peers, host, disk), when they move, and which rank updates them.

data_parallel           the meaning of a schedule's GATHER, RELEASE, REDUCE and STEP on one rank
     |
optimizers/             every piece of a parameter updated by the optimizer of its group
     |
buckets/                parameters in contiguous memory, sharded over replicas (ZeRO 1 to 3)
     |
tiers/                  pinned host memory and disk beneath the device
     |
parameter_group, muon
"""
