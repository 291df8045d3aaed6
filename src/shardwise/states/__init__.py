"""Where weights, gradients and optimizer state live (peers, host, disk), when they come, and who updates them.

data_parallel           what a schedule's GATHER, RELEASE, REDUCE and STEP mean on one rank
     |
optimizers/             every piece of a parameter updated by the optimizer of its group
     |
buckets/                parameters in runs of memory, shared out over replicas (ZeRO 1 to 3)
     |
tiers/                  pinned host memory and disk beneath the device
     |
parameter_group, muon
"""
