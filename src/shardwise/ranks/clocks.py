"""One clock for all ranks. Ranks of one machine share it; other machines correct theirs over the network.

A rank asks rank 0 for its time, and takes the answer as the time halfway between question and answer (Cristian 1989).
Of several answers the quickest is the best.
"""

import hashlib
import platform
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.ranks.faults import Watch

_NUM_QUESTIONS = 8


def this_machine() -> str:
    """Return a name that is the same for processes with the same clock only."""
    try:
        # It changes with each boot of the machine.
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


class SharedClock:
    """The offset of this rank's clock from that of rank 0. All ranks of the group ask at once."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        watch: Watch,
        *,
        clock: Callable[[], float] = perf_counter,
        machine: str | None = None,
    ) -> None:
        self._group, self._watch, self._clock = group, watch, clock
        self._machine = machine or this_machine()
        self._is_shared: bool | None = None

    def correction(self) -> float:
        """Return the seconds to add to this rank's clock. Measured each time, as clocks drift apart."""
        if self._is_shared is None:
            self._is_shared = self._compare_machines()
        if self._is_shared:
            return 0.0
        if self._group.rank() == 0:
            for other in range(1, self._group.size()):
                self._answer(other)
            return 0.0
        return min(self._ask() for _ in range(_NUM_QUESTIONS))[1]

    def _compare_machines(self) -> bool:
        digest = hashlib.blake2b(self._machine.encode(), digest_size=7).digest()
        mine = torch.tensor([int.from_bytes(digest, "big")])
        all_of_them = [torch.zeros_like(mine) for _ in range(self._group.size())]
        work: Any = dist.all_gather(all_of_them, mine, group=self._group, async_op=True)
        self._watch.wait(work, "the comparison of clocks")
        return all(torch.equal(each, mine) for each in all_of_them)

    def _ask(self) -> tuple[float, float]:
        """Ask once; return how long the answer took, and the offset of this clock by it."""
        answer, start = torch.zeros(1, dtype=torch.float64), self._clock()
        self._move(self._group.send([answer], 0, 0), 0)
        self._move(self._group.recv([answer], 0, 0), 0)
        end = self._clock()
        return end - start, float(answer) - (start + end) / 2

    def _answer(self, other: int) -> None:
        for _ in range(_NUM_QUESTIONS):
            question: Tensor = torch.zeros(1, dtype=torch.float64)
            self._move(self._group.recv([question], other, 0), other)
            self._move(self._group.send([torch.tensor([self._clock()], dtype=torch.float64)], other, 0), other)

    def _move(self, work: Any, peer: int) -> None:
        self._watch.wait(work, "the comparison of clocks", peer)
