"""The state of ranks in the memory of machines, and on its way between them: begin with `memory.py`. Needs no torch."""
