"""How far a GPU has come with what its host has asked of it.

Over NCCL a host does not wait: it asks for a collective, and goes on asking for what comes after it. So where the host
stands says little when another rank does not come to that collective. Where the device stands does.

    host     at F0 · F1 · B0 · B1 · the end          each time it asks the device to write down how far it has come
    device   at F0 ...                               behind B1: it stands still at F0

The number is written to pinned memory of the host, in the order of the stream, and is read there without asking CUDA:
questions to CUDA may themselves wait for a kernel that never ends.

A host may also wait between two marks, where a module's own code reads a number or copies one to the device. For a rank
that stays at a place somebody else asks (`ask`): the same, in memory of its own, by a thread that nobody waits for.
"""

import threading
from collections import deque
from contextlib import nullcontext

import torch

# A queue of a stream holds fewer, so no number is used twice in one.
_MOST_MARKS = 2048


class DeviceProgress:
    """The marks of one device. `mark` is called by the thread that computes, `behind` by any."""

    def __init__(self, device: torch.device) -> None:
        self._written = torch.full((1,), -1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._read = self._written.numpy()
        self._numbers = torch.split(torch.arange(_MOST_MARKS, device=device), 1)
        #: What was marked and may not have been passed: its number and the place, first to last.
        self._marks: deque[tuple[int, object]] = deque(maxlen=_MOST_MARKS)
        self._count = 0
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._answer = torch.full((1,), -1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._read_answer, self._asked = self._answer.numpy(), -1

    def mark(self, place: object) -> None:
        """Ask the device to say when it comes here."""
        number = self._count % _MOST_MARKS
        self._count += 1
        self._marks.append((number, place))
        self._written.copy_(self._numbers[number], non_blocking=True)

    def ask(self) -> None:
        """Ask the device to say when it has done all that it was asked for until now, unless it is still to answer."""
        if self._is_answered():
            self._asked = (self._asked + 1) % _MOST_MARKS
            threading.Thread(target=self._ask, args=(self._asked,), name="shardwise-ask", daemon=True).start()

    def _ask(self, number: int) -> None:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._answer.copy_(self._numbers[number], non_blocking=True)

    def _is_answered(self) -> bool:
        return int(self._read_answer[0]) == self._asked

    def behind(self) -> tuple[int, object] | None:
        """The number of the mark that the device has passed last, and where it stands since; None if it passed all."""
        last = int(self._read[0])
        marks = list(self._marks)
        passed = [place for place, (number, _) in enumerate(marks) if number == last]
        if not passed:
            return (-1, "the start") if marks else None
        for _ in range(passed[-1]):
            self._marks.popleft()
        has_passed_all = passed[-1] == len(marks) - 1
        return None if has_passed_all and self._is_answered() else (last, marks[passed[-1]][1])
