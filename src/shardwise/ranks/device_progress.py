"""Track how far a GPU has progressed with the work that its host has launched.

With NCCL a host does not wait: it launches a collective, and continues with what follows. So if another rank does not
join that collective, the position of the host says little; the position of the device does.

    host     at F0 · F1 · B0 · B1 · the end          at each place it launches a write of a number by the device
    device   at F0 ...                               the host has launched B1, but the device stands still at F0

The number is written to pinned host memory, in stream order, and read there without calling CUDA: a call to CUDA may
itself block on a kernel that never ends.

A host may also block between two marks, if a module's own code reads a number or copies one to the device. For a rank
that stays at one place, a separate thread asks (`ask`): the same write, to memory of its own, and no thread waits for
it.
"""

import threading
from collections import deque
from contextlib import nullcontext

import torch

# More than the queue of a stream holds, so no number is used twice in one.
_MOST_MARKS = 2048


class DeviceProgress:
    """The marks of one device. `mark` is called by the thread that computes, `behind` by any."""

    def __init__(self, device: torch.device) -> None:
        self._written = torch.full((1,), -1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._read = self._written.numpy()
        self._numbers = torch.split(torch.arange(_MOST_MARKS, device=device), 1)
        #: Marks that the device may not have passed: number and place, in order.
        self._marks: deque[tuple[int, object]] = deque(maxlen=_MOST_MARKS)
        self._count = 0
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._answer = torch.full((1,), -1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._read_answer, self._asked = self._answer.numpy(), -1

    def mark(self, place: object) -> None:
        """Let the device report when it gets here."""
        number = self._count % _MOST_MARKS
        self._count += 1
        self._marks.append((number, place))
        self._written.copy_(self._numbers[number], non_blocking=True)

    def ask(self) -> None:
        """Let the device report when it has done all work launched so far, unless an answer is still pending."""
        if self._is_answered():
            self._asked = (self._asked + 1) % _MOST_MARKS
            threading.Thread(target=self._ask, args=(self._asked,), name="shardwise-ask", daemon=True).start()

    def _ask(self, number: int) -> None:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._answer.copy_(self._numbers[number], non_blocking=True)

    def _is_answered(self) -> bool:
        return int(self._read_answer[0]) == self._asked

    def behind(self) -> tuple[int, object] | None:
        """Return the number of the last mark that the device has passed, and its place since; None if it passed all."""
        last = int(self._read[0])
        marks = list(self._marks)
        passed = [place for place, (number, _) in enumerate(marks) if number == last]
        if not passed:
            return (-1, "the start") if marks else None
        for _ in range(passed[-1]):
            self._marks.popleft()
        has_passed_all = passed[-1] == len(marks) - 1
        return None if has_passed_all and self._is_answered() else (last, marks[passed[-1]][1])
