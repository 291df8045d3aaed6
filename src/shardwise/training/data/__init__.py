"""Token files: written, memory-mapped, and read in an order that depends on the seed alone."""
