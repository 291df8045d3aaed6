"""This process among those of a run: its rank, its device, and values agreed on with the other ranks.

Every rank calls the methods in the same order. They use a process group of their own, apart from the engine's, and a
watch: if a rank fails within `telling`, the others raise an error that names it, wherever they wait.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.cluster.local import peak_memory_bytes
from shardwise.ranks.telling import find_watch, gather_objects, telling, wait_patiently
from shardwise.ranks.worker import join_if_launched

_TOLD = "what ranks of a run tell each other"


class World:
    """All processes of a run, of which there may be only one."""

    def __init__(self) -> None:
        join_if_launched()
        is_many = dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if is_many else (0, 1)
        self._watch = find_watch("run")
        self._group = None
        if self._watch is not None:
            self._watch.exchange(None, "the beginning of the run")
            self._group = self.guarded(dist.new_group(backend="gloo"))
        self.device = _device()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def telling(self) -> AbstractContextManager[None]:
        """Return a context that reports an error to the other ranks before it propagates."""
        return telling(self._watch)

    def guarded(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Return the group, whose waits now end when a rank fails."""
        if self._watch is not None:
            self._watch.guard(group)
        return group

    def gather(self, given: Any) -> list[Any]:
        """Return the values of all ranks, by rank."""
        if self._group is None or self._watch is None:
            return [given]
        return gather_objects(given, self._group, self._watch, _TOLD)

    def first(self, given: Any) -> Any:
        """Return the first rank's value."""
        return self.gather(given if self.is_first else None)[0]

    def highest(self, number: float) -> float:
        """Return the maximum over all ranks."""
        if self._group is None or self._watch is None:
            return number
        numbers: Tensor = torch.tensor([number], dtype=torch.float64)
        work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group, async_op=True)
        wait_patiently(work, self._watch, _TOLD)
        return float(numbers)

    def wait(self) -> None:
        """Wait until every rank has called this."""
        self.highest(0.0)

    def memory_bytes(self) -> int:
        """Return this rank's peak memory so far, of its GPU or else of the machine."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return peak_memory_bytes()

    def memory_share(self, num_bytes: float) -> float | None:
        """Return the share of this rank's GPU memory, or None on a CPU."""
        if self.device.type != "cuda":
            return None
        return num_bytes / torch.cuda.get_device_properties(self.device).total_memory

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        if self._group is not None:
            dist.destroy_process_group(self._group)


def _device() -> torch.device:
    """Return this process's current GPU if there is one for every rank, else the CPU."""
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if torch.cuda.is_available() and (alone or "nccl" in str(dist.get_backend_config())):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
