"""Processes on CPUs that go the way of GPUs: over the same files, to groups that only gloo connects.

They exchange by the groups' own collectives, have a link of two ranks for each direction between stages, and connect
all of them first, as ranks do that NCCL connects. Recorded, that is what NCCL would be asked for.
"""

import torch

from shardwise.ranks.wires import ManyProcesses


class RehearsedWires(ManyProcesses):
    """Wires of a process whose CPU stands for a GPU. They are made and used within `recording`."""

    def is_on_nccl(self, device: torch.device) -> bool:  # noqa: ARG002 - it stands for one
        return True
