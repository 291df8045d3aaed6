"""What ranks of a processor lose where they wait for each other again and again.

Something always comes between: the system, the host of a virtual machine, the threads that carry messages. Where ranks
meet after every piece, all of them wait for whoever was disturbed:

    by themselves   |--a--|--b--|----c----|--d--|
    with meetings   |--a--|..|--b--|..|----c----|..|--d--|..|      of two ranks, each as long as its slower one

All ranks measure it at once, each on one thread.
"""

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from shardwise.probing.steady import settled

#: About what a step computes between two sums of tensor parallelism: some milliseconds; and a step has so many.
_ROWS, _WIDTH, _PRODUCTS, _PIECES = 1024, 256, 4, 16
_TURNS = 12


def measure_meetings(meet: Callable[[], object]) -> float:
    """Seconds that are lost at a meeting beside those of its message. Every rank calls this; `meet` returns when all
    have called it."""
    left, right, into = torch.randn(_ROWS, _WIDTH), torch.randn(_WIDTH, _WIDTH), torch.empty(_ROWS, _WIDTH)

    def compute() -> None:
        for _ in range(_PRODUCTS):
            torch.mm(left, right, out=into)

    def compute_and_meet() -> None:
        compute()
        meet()

    pieces, lost = list[float](), list[float]()
    for _ in range(_TURNS):
        meet()
        alone = [_seconds(compute) for _ in range(_PIECES)]
        meet()
        met = [_seconds(compute_and_meet) for _ in range(_PIECES)]
        messages = [_seconds(meet) for _ in range(_PIECES)]
        # Of one turn: a machine that is slower for a while is so in all three.
        lost.append((sum(met) - sum(alone) - sum(messages)) / _PIECES)
        pieces += alone
    # Where more than a piece is lost, somebody else computes on the machine, who may be gone when a step is taken.
    return min(max(median(lost), 0.0), settled(pieces).seconds)


def _seconds(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start
