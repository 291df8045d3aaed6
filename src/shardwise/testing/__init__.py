"""What serves tests and benchmarks alone: devices whose compute is a wait of a known length."""
