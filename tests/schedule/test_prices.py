import pytest

from shardwise.errors import ShardwiseError
from shardwise.schedule.instruction import Kind, backward, forward, overlapped, parse
from shardwise.schedule.placement import loop, mirrored, vee
from shardwise.schedule.prices import StageTimes, free, stage_prices
from tests.schedule.playing import stage_times

TIMES = StageTimes(forward=1, input_gradient=1.25, weight_gradient=0.75, pair=2.5)


def test_a_full_backward_costs_its_two_parts() -> None:
    assert (TIMES.backward, TIMES.total) == (2, 3)
    prices = stage_prices(loop(1), [TIMES])
    assert [prices.seconds(parse(text), 0) for text in ("0F0", "0I0", "0W0", "0B0", "0STEP0", "0GATHER0")] == [
        1, 1.25, 0.75, 2, 0, 0,
    ]  # fmt: skip


def test_a_pair_costs_what_is_said_or_its_halves() -> None:
    pair = overlapped(forward(1, 1), backward(0, 0))
    assert stage_prices(mirrored(1), [TIMES]).seconds(pair, 0) == 2.5
    assert stage_prices(mirrored(1), [stage_times((1, 1.25, 0.75))]).seconds(pair, 0) == 3


def test_the_time_of_a_pair_is_that_of_a_forward_and_a_whole_backward_only() -> None:
    pair = overlapped(forward(1, 1), parse("0I0"))
    assert stage_prices(mirrored(1), [TIMES]).seconds(pair, 0) == 2.25


def test_the_times_of_a_rank_are_shared_out_over_its_chunks() -> None:
    prices = stage_prices(vee(2), [TIMES, stage_times((2, 2, 2))])
    assert [prices.seconds(forward(stage, 0), rank) for stage, rank in enumerate((0, 1, 1, 0))] == [0.5, 1, 1, 0.5]
    assert prices.seconds(overlapped(forward(0, 1), backward(3, 0)), 0) == 1.25


def test_the_times_of_each_stage_are_taken_as_they_are() -> None:
    prices = stage_prices(vee(2), [stage_times((seconds, 1, 1)) for seconds in (1, 2, 3, 4)])
    assert [prices.seconds(forward(stage, 0), rank) for stage, rank in enumerate((0, 1, 1, 0))] == [1, 2, 3, 4]


def test_a_model_that_is_held_twice_costs_each_stage_in_full() -> None:
    prices = stage_prices(mirrored(2), [TIMES, TIMES])
    assert [prices.seconds(forward(stage, 0), 0) for stage in range(4)] == [1, 1, 1, 1]


def test_one_hop_serves_all_boundaries_and_a_way_over_several_takes_as_long_as_the_slowest() -> None:
    send = parse("0SEND_F0>1")
    assert stage_prices(loop(3), [TIMES] * 3).hop_seconds(send, 0, 1) == (0, 0)
    assert stage_prices(loop(3), [TIMES] * 3, hops=[0.5]).hop_seconds(send, 0, 2) == (0.5, 0)
    prices = stage_prices(loop(4), [TIMES] * 4, hops=[0.5, 2, 1])
    assert prices.hop_seconds(send, 0, 1) == (0.5, 0)
    assert prices.hop_seconds(send, 3, 2) == (1, 0)
    assert prices.hop_seconds(send, 0, 3) == prices.hop_seconds(send, 3, 0) == (2, 0)


def test_an_activation_is_held_from_the_start_of_its_forward_to_the_end_of_its_last_gradient() -> None:
    held = stage_prices(vee(2), [TIMES] * 2, kept_for_weights=0.25).held
    assert held(forward(0, 0)) == (0.5, 0)
    assert held(parse("0I0")) == (0, -0.375)
    assert held(parse("0W0")) == (0, -0.125)
    assert held(parse("0B0")) == (0, -0.5)
    assert held(parse("0OFFLOAD0")) == (0, -0.5)
    assert held(parse("0RELOAD0")) == (0.5, 0)
    assert held(parse("0F1&3B0")) == (0.5, -0.5)
    assert held(parse("0F1&3I0")) == (0.5, -0.375)
    assert held(parse("0STEP0")) == held(parse("0GATHER0")) == (0, 0)


def test_what_is_free_costs_and_holds_nothing() -> None:
    prices = free()
    assert prices.seconds(forward(0, 0), 0) == 0
    assert prices.hop_seconds(parse("0SEND_F0>1"), 0, 1) == (0, 0)
    assert {prices.held(parse(f"0{kind}0")) for kind in (Kind.F, Kind.B, Kind.W)} == {(0, 0)}


@pytest.mark.parametrize(
    ("times", "pair", "problem", "remedy"),
    [
        ((-1, 1, 1), None, "the time of F is -1, but a time must be 0 or more", "--times 1,1,1"),
        ((1, float("nan"), 1), None, "the time of I is nan, but a time must be 0 or more", "--times 1,1,1"),
        ((1, 1, float("inf")), None, "the time of W is inf, but a time must be 0 or more", "--times 1,1,1"),
        ((0, 0, 0), None, "the times of F, I and W are all 0: nothing to schedule", "--times 1,1,1"),
        (
            (1, 1, 1),
            1.5,
            "an overlapped pair of 1.5 is not between its longer half, 2, and both together, 3",
            "--pair 2",
        ),
        ((1, 1, 1), 4, "an overlapped pair of 4 is not between its longer half, 2, and both together, 3", "--pair 2"),
    ],
)
def test_times_that_cannot_be_are_refused(
    times: tuple[float, float, float], pair: float | None, problem: str, remedy: str
) -> None:
    with pytest.raises(ShardwiseError) as caught:
        stage_times(times, pair)
    assert caught.value.problem == problem
    assert caught.value.remedy == remedy
