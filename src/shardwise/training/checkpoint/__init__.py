"""Checkpoints independent of the plan. Begin with `parts.py`, what a rank holds, and `index.py`, the format."""
