"""Memory below the device: weights, gradients, activations and optimizer state on the host or on disk."""

from shardwise.states.tiers.host_updates import HostUpdates
from shardwise.states.tiers.streamed_weights import StreamedWeights
from shardwise.states.tiers.streaming import stream

__all__ = ["HostUpdates", "StreamedWeights", "stream"]
