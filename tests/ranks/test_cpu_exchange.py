"""The thread that sums, as far as it is not seen in what is summed."""

import threading

from shardwise.ranks.collectives import Group
from shardwise.ranks.cpu_exchange import CpuExchange


def test_an_exchange_that_is_closed_over_a_sum_under_way_ends_it_and_itself() -> None:
    exchange, goes_on, done = CpuExchange(), threading.Event(), []

    def slow() -> None:
        goes_on.wait()
        done.append("slow")

    # The end is in the queue before the first has been run: an engine is closed where a step has failed.
    tickets = [exchange.sum_to_shards(None, Group(), 0, then=then) for then in (slow, lambda: done.append("last"))]  # type: ignore[arg-type]
    closing = threading.Thread(target=exchange.close, daemon=True)
    closing.start()
    goes_on.set()
    closing.join(10)
    assert not closing.is_alive()
    for each in tickets:
        each.wait()
    assert done == ["slow", "last"]
