"""Optimizers on sharded parameters: on pieces if they can work on them, otherwise on whole matrices."""
