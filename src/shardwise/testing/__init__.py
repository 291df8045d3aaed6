"""What serves tests and benchmarks alone: devices whose compute is a wait, and random programs for the dataflow."""
