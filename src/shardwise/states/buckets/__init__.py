"""Replicas of a pipeline: reduce gradients, and shard weights, gradients and optimizer state (ZeRO)."""
