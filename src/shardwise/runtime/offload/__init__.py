"""Optimizers whose state lies on the host."""

from shardwise.runtime.offload.updates import HostUpdates

__all__ = ["HostUpdates"]
