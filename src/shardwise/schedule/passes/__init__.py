"""Passes add to a compute-only schedule what a machine needs: transfers, gathers, reductions, steps, offloading."""
