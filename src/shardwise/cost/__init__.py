"""Seconds and bytes of one operation of a model on a cluster, and of the whole step."""
