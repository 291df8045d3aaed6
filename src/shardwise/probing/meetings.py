"""Measure the time that ranks on CPUs lose when they synchronise again and again.

Something always interferes: the operating system, the host of a virtual machine, the threads that carry messages. If
ranks synchronise ("meet") after every piece of work, all of them wait for the one that was delayed:

    by themselves   |--a--|--b--|----c----|--d--|
    with meetings   |--a--|..|--b--|..|----c----|..|--d--|..|      of two ranks, each as long as its slower one

They meet to add a megabyte, as tensor parallelism does: threads that carry it take turns with those that compute, and
what arrives is in another core's cache. If that takes long, as over a slow network, they only wait for each other.

All ranks measure at once, each on one thread.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter

import torch

from shardwise.probing.steady import settled
from shardwise.probing.whole_steps import Crowd, Passed

#: Roughly the work between two all-reduces of tensor parallelism, some milliseconds; and how many of them a step has.
_ROWS, _WIDTH, _PRODUCTS, _PIECES = 1024, 256, 4, 16
_TURNS = 12
#: The longest message, of all ranks: sixteen of them are sent twice in each turn.
_MOST_SECONDS = 0.01


def measure_meetings(crowd: Crowd) -> float:
    """Return the seconds lost per meeting, beyond the time of its message. Every rank calls this."""
    left, right, into = torch.randn(_ROWS, _WIDTH), torch.randn(_WIDTH, _WIDTH), torch.zeros(_ROWS, _WIDTH)

    def compute() -> None:
        for _ in range(_PRODUCTS):
            torch.mm(left, right, out=into)

    add = partial(crowd.add, into)
    add()  # The first one connects the ranks.
    crowd.meet()
    longest = max(each.total for (each,) in crowd.gather([Passed(_seconds(add), 0.0)]))
    meet = crowd.meet if longest > _MOST_SECONDS else add

    def compute_and_meet() -> None:
        compute()
        meet()

    pieces, lost = list[float](), list[float]()
    for _ in range(_TURNS):
        crowd.meet()
        alone = [_seconds(compute) for _ in range(_PIECES)]
        crowd.meet()
        met = [_seconds(compute_and_meet) for _ in range(_PIECES)]
        messages = [_seconds(meet) for _ in range(_PIECES)]
        # Compare within one turn: a machine that is slower for a while is slower in all three.
        lost.append((sum(met) - sum(alone) - sum(messages)) / _PIECES)
        pieces += alone
    # If more than a piece is lost, another process is using the machine, and may be gone when a step runs.
    return min(max(median(lost), 0.0), settled(pieces).seconds)


def _seconds(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start
