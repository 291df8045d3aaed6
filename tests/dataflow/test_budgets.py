"""Budgets are kept, whoever is evicted; policies evict whom they should."""

import pytest
import torch
from torch import Tensor

from shardwise.dataflow.data import Data
from shardwise.dataflow.eviction import AdaptiveReplacement, LeastRecentlyUsed, NextUse, Policy, make_policy
from shardwise.dataflow.links import Link
from shardwise.dataflow.machine import Machine
from tests.dataflow.machines import Shuffle

TILE = 40  # Bytes of ten numbers.


def touch(*tensors: Tensor) -> None:
    """A task that does nothing."""


def use(machine: Machine, data: Data, place: str = "cpu:0") -> None:
    machine.submit(touch, data, reads=[data], place=place)


def transfers_of(eviction: str, order: list[int], num_data: int, room: int) -> int:
    """How many transfers a replayed program takes that uses data in some order in a place with little room."""
    with Machine(["cpu:0"], budget={"cpu:0": room * TILE}, eviction=eviction) as machine:
        data = [machine.data(torch.full((10,), float(number))) for number in range(num_data)]

        def body() -> None:
            for number in order:
                use(machine, data[number])

        program = machine.record(body)
        program.replay()
        before = machine.mover.num_transfers
        program.replay()
        assert program.kind == "tasks"
        return machine.mover.num_transfers - before


def test_the_least_recently_used_copy_goes_first() -> None:
    with Machine(["cpu:0"], budget={"cpu:0": 2 * TILE}) as machine:
        a, b, c = (machine.data(torch.ones(10)) for _ in range(3))
        for each in (a, b, a, c):
            use(machine, each)
        assert [each.state("cpu:0") for each in (a, b, c)] == ["valid", "absent", "valid"]


def test_a_clean_copy_is_dropped_and_a_dirty_one_is_brought_to_the_host() -> None:
    with Machine(["cpu:0"], budget={"cpu:0": 2 * TILE}) as machine:
        clean, dirty, other, another = machine.data(torch.ones(10)), *(machine.empty((10,)) for _ in range(3))
        use(machine, clean)
        for each in (dirty, other, another):
            machine.submit(torch.full, (10,), 3.0, into=each, place="cpu:0")
        assert clean.places == ("host",)
        assert (dirty.places, other.places, another.places) == (("host",), ("cpu:0",), ("cpu:0",))
        assert machine.mover.moved_bytes == {(1, 0): TILE, (0, 1): TILE}
        assert dirty.get().tolist() == [3.0] * 10


def test_a_copy_out_of_date_goes_before_any_other() -> None:
    with Machine(["cpu:0", "cpu:1"], budget={"cpu:0": 2 * TILE}) as machine:
        a, b, c = (machine.data(torch.ones(10)) for _ in range(3))
        use(machine, a)
        use(machine, b)
        machine.submit(torch.neg, b, into=b, place="cpu:1")  # The copy at cpu:0 was used last, but is worth nothing.
        use(machine, c)
        assert [each.state("cpu:0") for each in (a, b, c)] == ["valid", "absent", "valid"]


def test_what_a_task_uses_is_not_evicted_for_its_own_sake() -> None:
    with Machine(["cpu:0"], budget={"cpu:0": 3 * TILE}) as machine:
        a, b, c, d = (machine.data(torch.full((10,), float(number))) for number in range(4))
        total = machine.empty((10,))
        for each in (a, b, c, d):
            use(machine, each)
        machine.submit(torch.add, a, b, into=total, place="cpu:0")
        assert total.get().tolist() == [1.0] * 10
        assert machine.places[0].memory.peak_bytes == 3 * TILE


def test_by_next_use_a_loop_that_does_not_fit_misses_as_little_as_can_be() -> None:
    """Four values used in turn with room for three: LRU misses all, Belady's rule the fewest."""
    assert transfers_of("lru", [0, 1, 2, 3], 4, room=3) == 4
    assert transfers_of("next-use", [0, 1, 2, 3] * 3, 4, room=3) == 4  # Of twelve uses, every third.


def test_arc_keeps_what_is_used_often_when_much_is_used_once() -> None:
    """Two values used all the time, and a stream of others: recency alone would throw the two out."""
    order = [0, 1, 0, 1, 2, 3, 4, 0, 1, 5, 6, 7]
    assert transfers_of("lru", order, 8, room=3) == 10
    assert transfers_of("arc", order, 8, room=3) == 6


@pytest.mark.parametrize("policy", [LeastRecentlyUsed(), AdaptiveReplacement(), NextUse(lambda: (0, 0))])
def test_a_policy_forgets_what_is_removed(policy: Policy) -> None:
    with Machine(["cpu:0"]) as machine:
        a, b = machine.data(torch.ones(10)), machine.data(torch.ones(10))
        copies = [each.copies[machine.host.index] for each in (a, b)]
        for copy in copies:
            assert copy is not None
            policy.add(copy)
            policy.touch(copy)
        first, second = copies
        assert first is not None
        policy.remove(first, evicted=False)
        assert list(policy.order()) == [second]
        policy.touch(first)
        assert list(policy.order()) == [second]


def test_arc_gives_more_room_to_the_list_from_which_it_evicted_too_early() -> None:
    policy = AdaptiveReplacement()
    with Machine(["cpu:0"]) as machine:
        data = [machine.data(torch.ones(10)) for _ in range(3)]
        copies = [each.copies[machine.host.index] for each in data]
        once, often, _ = copies
        assert once is not None
        assert often is not None
        policy.add(often)
        policy.touch(often)
        policy.add(once)
        assert list(policy.order()) == [once, often]
        policy.remove(once, evicted=True)
        policy.add(once)  # It was missed: the once-used get more room, and this one counts as often used now.
        assert list(policy.order()) == [often, once]


def test_policies_have_names() -> None:
    assert isinstance(make_policy("lru", lambda: (0, 0)), LeastRecentlyUsed)
    assert isinstance(make_policy("arc", lambda: (0, 0)), AdaptiveReplacement)
    assert isinstance(make_policy("next-use", lambda: (0, 0)), NextUse)


def test_a_buffer_is_given_back_once_though_its_data_die_while_it_is_evicted() -> None:
    with Machine(["cpu:0"]) as machine:
        data = machine.data(torch.ones(10))
        machine.prefetch(data, "cpu:0")
        copy = data.copies[0]
        assert copy is not None
        machine.mover.evict(copy)
        machine.mover.drop(copy)
        assert machine.places[0].memory.live_bytes == 0


def test_buffers_of_one_size_take_turns_without_the_host_waiting() -> None:
    """Ten layers through two buffers: the tasks wait for each other on streams, and the copies run beside them."""
    with Machine(["cpu:0"], budget={"cpu:0": 3 * TILE}, links=Link(bytes_per_second=TILE)) as machine:
        x = machine.empty((10,))
        machine.submit(torch.zeros, 10, into=x, place="cpu:0", seconds=1.0)
        for number in range(10):
            weight = machine.data(torch.full((10,), float(number)))
            machine.submit(torch.add, x, weight, into=x, place="cpu:0", seconds=1.0)
        report = machine.report()
        assert machine.places[0].memory.num_waits == 0
        assert machine.places[0].memory.peak_bytes == 3 * TILE
        assert report.makespan_seconds == pytest.approx(1 + 10)
        assert x.get().tolist() == [45.0] * 10


def test_a_buffer_of_another_size_is_waited_for_only_when_there_is_no_room_for_both() -> None:
    with Machine(["cpu:0"], budget={"cpu:0": 3 * TILE}, make_stream=Shuffle(1).make()) as machine:
        small, large = machine.data(torch.ones(10)), machine.data(torch.ones(25))
        use(machine, small)
        use(machine, large)
        assert machine.places[0].memory.num_waits == 1
        assert machine.places[0].memory.peak_bytes <= 3 * TILE
