"""Copies of rank state in the memory of machines, and their transfers. Begin with `memory.py`. Needs no torch."""
