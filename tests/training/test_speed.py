"""How fast a run says that it goes: without its first step, and nothing where there was no step."""

import pytest

from shardwise.training.speed import Speed


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_first_step_is_in_the_seconds_and_not_in_the_tokens_per_second() -> None:
    clock = Clock()
    speed = Speed(10, num_tokens=64, clock=clock)
    seconds = []
    for step, took in ((11, 30.0), (12, 2.0), (13, 2.0)):
        clock.now += took
        seconds.append(speed.note(step))
        if step == 12:
            clock.now += 4.0  # An evaluation.
            speed.go_on()
    speed.stop(13)
    assert seconds == [30.0, 2.0, 2.0]
    assert speed.seconds == 38.0
    assert speed.tokens_per_second == 2 * 64 / 8.0
    assert speed.since_told(13) == pytest.approx(3 * 64 / 38.0)


def test_a_run_of_one_step_has_the_speed_of_that_one_and_one_of_none_has_none() -> None:
    clock = Clock()
    one, none = (Speed(0, num_tokens=8, clock=clock) for _ in range(2))
    clock.now += 2.0
    one.note(1)
    one.stop(1)
    none.stop(0)
    assert one.tokens_per_second == 4.0
    assert none.tokens_per_second is None
