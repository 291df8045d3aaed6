"""The thread that sums, as far as it is not seen in what is summed."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.ranks import cpu_exchange
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


class Looked:
    """A watch that notes for whom a wait is."""

    note_beside = None

    def __init__(self, goes_on: threading.Event) -> None:
        self.goes_on, self.found = goes_on, list[Any]()

    def wait_for(self, event: threading.Event, where: Callable[[], object]) -> None:
        self.found.append(where())
        self.goes_on.set()
        event.wait(10)


def test_a_sum_behind_another_waits_for_the_rank_that_this_one_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights in shards a rank adds up alone what it has got from another. If that one is stopped, this rank must
    not say that it waits for itself."""
    begun, goes_on = threading.Event(), threading.Event()
    watch = Looked(goes_on)
    exchange = CpuExchange(watch)  # type: ignore[arg-type]
    monkeypatch.setattr(cpu_exchange, "_next_rank", lambda group: 3 if group.size > 1 else 0)

    def late() -> Any:
        yield ()
        begun.set()
        goes_on.wait(10)

    exchange._start(late(), Group(SimpleNamespace(size=lambda: 2, rank=lambda: 0)), follows=False)  # type: ignore[arg-type]
    alone = exchange.sum_to_shards(None, Group(), 0, then=lambda: None)  # type: ignore[arg-type]
    assert begun.wait(10)
    alone.wait()
    exchange.close()
    assert watch.found == [("a sum of gradients", 3)]


def test_a_rank_that_adds_up_alone_waits_for_nobody() -> None:
    goes_on = threading.Event()
    watch = Looked(goes_on)
    exchange = CpuExchange(watch)  # type: ignore[arg-type]
    exchange.sum_to_shards(None, Group(), 0, then=lambda: goes_on.wait(10) and None).wait()  # type: ignore[arg-type]
    exchange.close()
    assert watch.found == [None]
