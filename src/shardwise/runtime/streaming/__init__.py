"""Weights that live on the host and come to a device ahead of their use."""

from shardwise.runtime.streaming.weights import StreamedWeights, stream

__all__ = ["StreamedWeights", "stream"]
