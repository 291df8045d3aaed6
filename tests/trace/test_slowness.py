"""Who is slow, and by what, in steps that are put together by hand."""

import pytest

from shardwise.trace import slowness
from shardwise.trace.events import Event, Lane, Trace
from shardwise.trace.slowness import LOOKS, SLOW_LOOKS, SlowCause, Slowness


def a_step(start: float, compute: list[float], data: list[float] | None = None) -> Trace:
    """Each rank waits for its batch, computes, and then for the others."""
    data = data or [0.0] * len(compute)
    end = start + max(sum(both) for both in zip(compute, data, strict=True))
    events = []
    for rank, (work, waits) in enumerate(zip(compute, data, strict=True)):
        begin = start + waits
        events.append(Event("its batch", rank, Lane.DATA, start, begin, rank, 0))
        events.append(Event(f"{rank}F0", rank, Lane.COMPUTE, begin, begin + work, rank, 0))
        events.append(Event("a sum of gradients", rank, Lane.WAIT, begin + work, end, rank, 0))
    windows = ((start, end),) * len(compute)
    return Trace(name="step", num_ranks=len(compute), events=tuple(events), windows=windows)


def found(looker: Slowness, steps: list[Trace]) -> set[tuple[int, SlowCause]]:
    told = [looker.look(each, 100 * number) for number, each in enumerate(steps, start=round(steps[0].start))][-1]
    return {(each.rank, each.cause) for each in told}


def test_a_rank_is_named_by_compute_or_data_when_it_was_slow_in_most_steps() -> None:
    slow = [a_step(10.0 * number, [1.0, 1.0, 2.0, 1.0]) for number in range(LOOKS)]
    assert found(Slowness([0, 0, 0, 0], has_links=False), slow) == {(2, SlowCause.COMPUTE)}
    hungry = [a_step(10.0 * number, [1.0] * 4, [0.0, 0.5, 0.0, 0.0]) for number in range(LOOKS)]
    assert found(Slowness([0, 0, 0, 0], has_links=False), hungry) == {(1, SlowCause.DATA)}
    assert found(Slowness([0, 0, 0, 0], has_links=False), slow[: SLOW_LOOKS - 1]) == set()


def test_a_rank_that_is_slow_no_more_is_forgotten() -> None:
    looker = Slowness([0, 0], has_links=False)
    assert found(looker, [a_step(10.0 * number, [1.0, 2.0]) for number in range(LOOKS)])
    assert not found(looker, [a_step(1000 + 10.0 * number, [1.0, 1.0]) for number in range(LOOKS)])


def test_stages_may_differ_and_are_held_against_their_own_first_steps() -> None:
    looker = Slowness([0, 1], has_links=False)
    assert not found(looker, [a_step(10.0 * number, [1.0, 3.0]) for number in range(LOOKS)])
    slower = [a_step(1000 + 10.0 * number, [1.0, 6.0]) for number in range(LOOKS)]
    assert found(looker, slower) == {(1, SlowCause.COMPUTE)}
    # A machine that slows both is no slow rank.
    both = Slowness([0, 1], has_links=False)
    assert not found(both, [a_step(10.0 * number, [1.0, 3.0]) for number in range(LOOKS)])
    assert not found(both, [a_step(1000 + 10.0 * number, [2.0, 6.0]) for number in range(LOOKS)])


def test_looks_that_follow_each_other_at_once_count_once() -> None:
    looker = Slowness([0, 0], has_links=False)
    seconds = slowness.SECONDS_BETWEEN_LOOKS / 100
    told = [looker.look(a_step(0.0, [seconds / 2, seconds]), step) for step in range(100 * LOOKS)]
    assert next(step for step, slow in enumerate(told) if slow) == 100 * (SLOW_LOOKS - 1)


@pytest.mark.parametrize("has_links", [True, False])
def test_values_that_are_long_on_their_way_to_one_rank_are_a_link(has_links: bool) -> None:
    def step(start: float) -> Trace:
        events = []
        for pipeline, seconds in ((0, 0.1), (1, 1.0), (2, 0.1)):
            first, second = 2 * pipeline, 2 * pipeline + 1
            events.append(Event("0F0", first, Lane.COMPUTE, start, start + 1, 0, 0))
            events.append(Event("0SEND_F0>1", first, Lane.SEND, start + 1, start + 1.01, 0, 0, peer=second))
            sent = len(events) - 1
            came = start + 1 + seconds
            events.append(Event("1RECV_F0<0", second, Lane.RECEIVE, start + 0.5, came, 1, 0, after=sent, peer=first))
            events.append(Event("1F0", second, Lane.COMPUTE, came, came + 1, 1, 0))
        return Trace(name="step", num_ranks=6, events=tuple(events), windows=((start, start + 3),) * 6)

    steps = [step(10.0 * number) for number in range(LOOKS)]
    expected = {(3, SlowCause.LINK)} if has_links else set()
    assert found(Slowness([0, 1, 0, 1, 0, 1], has_links=has_links), steps) == expected
