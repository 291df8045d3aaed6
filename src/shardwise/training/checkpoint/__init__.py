"""Checkpoints that know no plan: begin with `parts.py`, which says what a rank holds, and `index.py`, the format."""
