"""Who does what, in which order: the schedule language, its generators, passes, verifier and simulator.

instruction, placement       one action of a rank; which rank holds which stage
      |
generators/, auto/           each rank's compute, in order; catalogue: by name
      |
schedule, text               the lists as a value, and as a file
      |
passes/                      add transfers, gathers, offloads and steps; lower: those of a plain step
      |
verify, simulate             proof before the launch; the step with prices. Both over needs: what waits for what
"""
