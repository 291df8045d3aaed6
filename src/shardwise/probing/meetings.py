"""What ranks of a processor lose where they wait for each other again and again, and how much longer long work takes
than its quickest pieces.

A kernel is timed in moments in which nothing came between. A step is too long for that: the system comes between, the
host of a virtual machine, the threads that carry messages. And where ranks meet after every piece, all of them wait for
whoever was disturbed:

    by themselves   |--a--|--b--|----c----|--d--|
    with meetings   |--a--|..|--b--|..|----c----|..|--d--|..|      of two ranks, each as long as its slower one

All ranks measure it at once, each on one thread.
"""

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import torch

from shardwise.probing.steady import settled

#: About what a step computes between two sums of tensor parallelism: some milliseconds; and a step has so many.
_ROWS, _WIDTH, _PRODUCTS, _PIECES = 1024, 256, 4, 16
_TURNS = 5
#: What comes between on a machine that has nothing else to do is no more than this: beyond, somebody else computes
#: there, who may be gone when a step is taken, and a meeting loses a piece at most.
_MOST_SLOWER = 1.15


class Meetings(NamedTuple):
    """Seconds that are lost at a meeting beside those of its message, and how many times the quickest quarter of
    pieces one of many takes."""

    seconds: float
    slower: float


def measure_meetings(meet: Callable[[], object]) -> Meetings:
    """Every rank calls this; `meet` returns when all have called it."""
    left, right, into = torch.randn(_ROWS, _WIDTH), torch.randn(_WIDTH, _WIDTH), torch.empty(_ROWS, _WIDTH)

    def compute() -> None:
        for _ in range(_PRODUCTS):
            torch.mm(left, right, out=into)

    def compute_and_meet() -> None:
        compute()
        meet()

    pieces, alone, met, messages = list[float](), list[float](), list[float](), list[float]()
    for _ in range(_TURNS):
        meet()
        taken = [_seconds(compute) for _ in range(_PIECES)]
        meet()
        met.append(sum(_seconds(compute_and_meet) for _ in range(_PIECES)))
        messages.append(sum(_seconds(meet) for _ in range(_PIECES)))
        pieces += taken
        alone.append(sum(taken))
    long, piece = settled(alone).seconds, settled(pieces).seconds
    lost = (settled(met).seconds - long - settled(messages).seconds) / _PIECES
    return Meetings(min(max(lost, 0.0), piece), min(max(long / (_PIECES * piece), 1.0), _MOST_SLOWER))


def _seconds(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start
