"""What serves tests and benchmarks alone: devices whose compute is a wait, reference flows and random programs for dataflow/."""
