import pytest

from shardwise.errors import ShardwiseError
from shardwise.schedule.placement import Placement, loop, mirrored, vee, wave


def test_a_loop_of_one_chunk_is_the_plain_pipe() -> None:
    placement = loop(3)
    assert placement.ranks == (0, 1, 2)
    assert placement.stages == ((0,), (1,), (2,))
    assert placement.pipes == ((0, 1, 2),)
    assert (placement.num_ranks, placement.num_stages, placement.num_chunks, placement.share) == (3, 3, 1, 1)


def test_a_loop_of_two_chunks_goes_from_the_last_rank_back_to_the_first() -> None:
    placement = loop(2, 2)
    assert placement.stages == ((0, 2), (1, 3))
    assert placement.sources == ((), (0,), (1,), (2,))
    assert placement.targets == ((1,), (2,), (3,), ())
    assert (placement.num_chunks, placement.share) == (2, 0.5)


def test_a_vee_turns_inside_the_last_rank() -> None:
    placement = vee(2)
    assert placement.stages == ((0, 3), (1, 2))
    assert placement.ranks == (0, 1, 1, 0)
    assert (placement.num_chunks, placement.share) == (2, 0.5)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_rank_r_of_a_vee_holds_stage_r_and_the_one_as_far_from_the_end(num_ranks: int) -> None:
    assert vee(num_ranks).stages == tuple((rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks))


@pytest.mark.parametrize("num_waves", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_a_wave_goes_down_and_up_again_and_each_step_is_to_a_neighbour(num_ranks: int, num_waves: int) -> None:
    placement = wave(num_ranks, num_waves)
    assert placement.num_stages == 2 * num_ranks * num_waves
    assert placement.num_chunks == 2 * num_waves
    assert placement.share == pytest.approx(1 / (2 * num_waves))
    steps = [abs(here - there) for here, there in zip(placement.ranks, placement.ranks[1:], strict=False)]
    assert max(steps) <= 1
    # It turns at the bottom once a wave, and at the top between two waves.
    turns = steps.count(0)
    assert turns == (2 * num_waves - 1 if num_ranks > 1 else len(steps))


def test_a_mirrored_model_is_held_twice_in_opposite_directions() -> None:
    placement = mirrored(2)
    assert placement.stages == ((0, 3), (1, 2))
    assert placement.pipes == ((0, 1), (2, 3))
    assert placement.ties == ((0, 2), (1, 3))
    assert placement.sources == ((), (0,), (), (2,))
    assert placement.targets == ((1,), (), (3,), ())
    assert (placement.num_chunks, placement.share) == (2, 1)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 7])
def test_the_copies_of_a_mirrored_stage_lie_at_opposite_ranks(num_ranks: int) -> None:
    placement = mirrored(num_ranks)
    for down, up in placement.ties:
        assert placement.ranks[down] + placement.ranks[up] == num_ranks - 1
        assert placement.pipes[0].index(down) == placement.pipes[1].index(up)


def test_even_microbatches_of_a_mirrored_model_go_down_and_odd_ones_up() -> None:
    placement = mirrored(3)
    assert [placement.pipe(microbatch) for microbatch in range(3)] == [(0, 1, 2), (3, 4, 5), (0, 1, 2)]


def test_all_microbatches_of_a_single_model_take_one_pipe() -> None:
    placement = vee(2)
    assert {placement.pipe(microbatch) for microbatch in range(5)} == {(0, 1, 2, 3)}


def test_a_skipped_value_is_read_by_the_stage_that_it_jumps_to() -> None:
    placement = loop(4).with_skips((0, 2), (0, 3))
    assert placement.sources == ((), (0,), (0, 1), (0, 2))
    assert placement.targets == ((1, 2, 3), (2,), (3,), ())


def test_a_skip_to_the_next_stage_is_the_value_that_goes_there_anyway() -> None:
    placement = loop(3).with_skips((0, 1))
    assert placement.sources == loop(3).sources
    assert placement.targets == loop(3).targets


def test_a_skip_in_a_copy_of_the_model_stays_in_that_copy() -> None:
    placement = mirrored(3).with_skips((3, 5))
    assert placement.sources[5] == (3, 4)
    assert placement.sources[2] == (1,)


def test_skips_and_ties_add_up_and_leave_the_placement_as_it_was() -> None:
    plain = loop(4)
    placement = plain.with_skips((0, 2)).with_ties((0, 3)).with_skips((1, 3)).with_ties((1, 2))
    assert placement.skips == ((0, 2), (1, 3))
    assert placement.ties == ((0, 3), (1, 2))
    assert (plain.skips, plain.ties) == ((), ())


@pytest.mark.parametrize("skip", [(2, 0), (1, 1), (0, 4), (-1, 2)])
def test_a_skip_that_does_not_go_to_a_later_stage_is_refused(skip: tuple[int, int]) -> None:
    with pytest.raises(ShardwiseError) as caught:
        loop(4).with_skips(skip)
    assert caught.value.problem == f"a skip from stage {skip[0]} to stage {skip[1]} does not go to a later stage of 4"
    assert caught.value.remedy == "a pair (earlier stage, later stage)"


def test_a_skip_from_one_copy_of_the_model_to_the_other_is_refused() -> None:
    with pytest.raises(ShardwiseError, match="a skip from stage 0 to stage 5 does not go to a later stage of 6"):
        mirrored(3).with_skips((0, 5))


@pytest.mark.parametrize("tie", [(0,), (), (1, 1), (0, 4), (-1, 2)])
def test_a_tie_that_does_not_name_two_stages_is_refused(tie: tuple[int, ...]) -> None:
    with pytest.raises(ShardwiseError) as caught:
        loop(4).with_ties(tie)
    assert caught.value.problem == f"tie {tie} must name two or more different stages of 0 to 3"
    assert caught.value.remedy == "(0, 3) for a head tied to the embedding over four stages"


def test_a_placement_of_ones_own_may_put_any_stage_anywhere() -> None:
    placement = Placement(ranks=(0, 1, 1), pipes=((0, 1, 2),))
    assert placement.stages == ((0,), (1, 2))
    assert placement.num_chunks == 2
    assert placement.share == pytest.approx(2 / 3)
