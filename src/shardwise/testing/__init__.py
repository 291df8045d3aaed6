"""What serves tests and benchmarks alone: timed devices, reference flows, random programs."""
