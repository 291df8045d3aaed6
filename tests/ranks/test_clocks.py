"""One clock for all ranks, though each machine has its own."""

from time import perf_counter

import torch.distributed as dist

from shardwise.ranks.clocks import SharedClock, this_machine
from shardwise.ranks.faults import Watch
from shardwise.ranks.spawn import Ranks


def corrections(ahead: list[float], machines: list[str | None]) -> tuple[float, float, float]:
    """What two ranks, whose clocks are ahead of the true one, are to add, asked twice; and how long that took."""
    rank = dist.get_rank()
    watch = Watch(rank, 2)
    clock = SharedClock(
        dist.new_group(backend="gloo"), watch, clock=lambda: perf_counter() + ahead[rank], machine=machines[rank]
    )
    start = perf_counter()
    found = clock.correction(), clock.correction()
    took = perf_counter() - start
    watch.close()
    return *found, took


def test_ranks_of_one_machine_have_one_clock(two: Ranks) -> None:
    assert [found[:2] for found in two.run(corrections, [0.0, 0.0], [None, None])] == [(0.0, 0.0), (0.0, 0.0)]
    assert this_machine() == this_machine()


def test_a_clock_of_another_machine_is_corrected_to_that_of_rank_0(two: Ranks) -> None:
    first, (*second, took) = two.run(corrections, [5.0, 105.0], ["one", "two"])
    assert first[:2] == (0.0, 0.0)
    # Off by no more than half of what the quickest answer took, so by less than all of them.
    assert all(abs(each + 100.0) < took for each in second)
