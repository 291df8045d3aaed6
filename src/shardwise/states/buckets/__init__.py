"""Replicas of a pipeline: gradients summed, and weights, gradients and optimizer states shared out (ZeRO)."""
