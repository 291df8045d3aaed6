"""Seconds and bytes of one operation of a model on a cluster, and of the whole step.

compute, processor, collective    an operation on a device, on a CPU; communication on a topology
      |
deal ---> stage                   layers over stages; one microbatch on the first, a middle and the last stage
            |
pipeline, replicas, host          the schedule over stages; data parallelism; copies from and to the host
            |
step ---- memory, bounds          seconds of the step; bytes of a rank; lower bounds
  |
play                              one layout on its schedule, instruction by instruction
"""
