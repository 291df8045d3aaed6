"""Tools for tests and benchmarks only: timed devices, reference flows, random programs."""
