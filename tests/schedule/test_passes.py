"""What the passes add, and that it is where it should be: whatever the times, nothing waits that need not."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ShardwiseError
from shardwise.schedule.catalogue import CATALOGUE, make_schedule
from shardwise.schedule.generators.pipedream_2bw import pipedream_2bw
from shardwise.schedule.instruction import BACKWARD, RECEIVES, SENDS, Instruction, Kind, forward
from shardwise.schedule.needs import Needs
from shardwise.schedule.passes.backward import split_backward
from shardwise.schedule.passes.communication import insert_communication
from shardwise.schedule.passes.lower import lower
from shardwise.schedule.passes.offload import insert_offloads
from shardwise.schedule.passes.sharding import insert_gathers
from shardwise.schedule.passes.steps import insert_steps
from shardwise.schedule.placement import Placement, loop, vee
from shardwise.schedule.prices import Prices
from shardwise.schedule.schedule import Schedule
from shardwise.schedule.simulate import play, simulate
from shardwise.schedule.verify import verify
from shardwise.trace.events import Lane
from shardwise.trace.memory import peaks
from tests.schedule.playing import UNIT, even_prices, event_of, played_schedule, texts, written


def with_skips(schedule: Schedule, *skips: tuple[int, int]) -> Schedule:
    return replace(schedule, placement=schedule.placement.with_skips(*skips))


def with_ties(schedule: Schedule, *ties: tuple[int, ...]) -> Schedule:
    return replace(schedule, placement=schedule.placement.with_ties(*ties))


#: Every named schedule, and some whose values jump or whose weights are shared; computation only.
SCHEDULES = {
    **{name: make_schedule(name, 4, 8) for name in CATALOGUE},
    "1f1b of 2 ranks": make_schedule("1f1b", 2, 5),
    "zb-v of 3 ranks": make_schedule("zb-v", 3, 4),
    "interleaved by 3": make_schedule("interleaved", 3, 7, 3),
    "1f1b with skips": with_skips(make_schedule("1f1b", 4, 8), (0, 2), (0, 3)),
    "zb-v with skips": with_skips(make_schedule("zb-v", 4, 8), (0, 7), (2, 4), (1, 5)),
    "interleaved with skips": with_skips(make_schedule("interleaved", 4, 8), (0, 6), (3, 5)),
    "1f1b with a tie": insert_steps(with_ties(make_schedule("1f1b", 4, 8), (0, 3))),
    "zb-v with a tie": insert_steps(with_ties(make_schedule("zb-v", 4, 8), (0, 7))),
    "zb-v with a tie across ranks": insert_steps(with_ties(make_schedule("zb-v", 4, 8), (1, 7))),
    "interleaved with a tie": insert_steps(with_ties(make_schedule("interleaved", 4, 8), (0, 7))),
    "interleaved with a tie inside": insert_steps(with_ties(make_schedule("interleaved", 2, 4, 3), (3, 4))),
    "dualpipe with its ties": insert_steps(make_schedule("dualpipe", 8, 16)),
}

each_schedule = pytest.mark.parametrize("name", SCHEDULES)


# Communication


def transfers(schedule: Schedule) -> Iterator[tuple[Instruction, int]]:
    """Each value that another rank reads: what makes it (as `F` or `I`), and the stage that reads it."""
    placement = schedule.placement
    for order in schedule.orders:
        for instruction in order:
            for part in instruction.parts:
                if part.kind is Kind.F:
                    readers = placement.targets[part.stage]
                elif part.kind in BACKWARD:
                    readers = placement.sources[part.stage]
                else:
                    continue
                for reader in readers:
                    if placement.ranks[reader] != placement.ranks[part.stage]:
                        yield part._replace(kind=Kind.F if part.kind is Kind.F else Kind.I), reader


@each_schedule
def test_every_value_that_another_rank_reads_is_sent_and_received_once(name: str) -> None:
    schedule = SCHEDULES[name]
    lowered = insert_communication(schedule)
    wanted = sorted(
        text
        for made, reader in transfers(schedule)
        for letter in ("F" if made.kind is Kind.F else "B",)
        for text in (
            f"{made.stage}SEND_{letter}{made.microbatch}>{reader}",
            f"{reader}RECV_{letter}{made.microbatch}<{made.stage}",
        )
    )
    found = sorted(
        str(instruction) for order in lowered.orders for instruction in order if instruction.kind in SENDS | RECEIVES
    )
    assert found == wanted


@each_schedule
def test_a_send_and_a_receive_stand_on_the_ranks_of_their_stages_and_the_computation_is_left_as_it_was(
    name: str,
) -> None:
    schedule = SCHEDULES[name]
    lowered = insert_communication(schedule)
    for rank, order in enumerate(lowered.orders):
        assert {lowered.placement.ranks[instruction.stage] for instruction in order} == {rank}
        rest = tuple(each for each in order if each.kind not in SENDS | RECEIVES)
        assert rest == schedule.orders[rank]


@each_schedule
def test_a_send_stands_directly_behind_what_it_sends(name: str) -> None:
    for order in insert_communication(SCHEDULES[name]).orders:
        maker: Instruction | None = None
        for instruction in order:
            if instruction.kind not in SENDS:
                maker = instruction
                continue
            assert maker is not None
            made = [(part.kind is Kind.F, part.stage, part.microbatch) for part in maker.parts]
            assert (instruction.kind is Kind.SEND_F, instruction.stage, instruction.microbatch) in made


@each_schedule
def test_a_receive_stands_before_the_computation_that_reads_it(name: str) -> None:
    lowered = insert_communication(SCHEDULES[name])
    needs = Needs(lowered)
    for node, befores in enumerate(needs.before):
        for before in befores:
            if needs.nodes[before].kind in RECEIVES:
                assert needs.rank[before] == needs.rank[node]
                assert before < node


@each_schedule
def test_the_receives_of_a_link_stand_in_the_order_of_its_sends(name: str) -> None:
    lowered = insert_communication(SCHEDULES[name])
    ranks = lowered.placement.ranks
    sent: dict[tuple[int, int], list[str]] = {}
    received: dict[tuple[int, int], list[str]] = {}
    for rank, order in enumerate(lowered.orders):
        for kind, stage, microbatch, peer, _ in order:
            if peer is None:
                continue
            if kind in SENDS:
                sent.setdefault((rank, ranks[peer]), []).append(f"{kind[-1]}{microbatch} {stage} to {peer}")
            elif kind in RECEIVES:
                received.setdefault((ranks[peer], rank), []).append(f"{kind[-1]}{microbatch} {peer} to {stage}")
    assert received == sent


def random_prices(draw: st.DrawFn, schedule: Schedule) -> Prices:
    """Times that differ for every stage and kind, hops that differ for every link, some of which occupy theirs."""
    lengths = st.integers(min_value=0, max_value=12).map(lambda quarters: quarters / 4)
    kinds = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.STEP, Kind.REDUCE)
    stages = range(schedule.placement.num_stages)
    seconds = {(kind, stage): draw(lengths) for kind in kinds for stage in stages}
    occupies = draw(st.booleans())
    hops = {(here, there): draw(lengths) for here, there in combinations(range(schedule.num_ranks), 2)}

    def of(instruction: Instruction, rank: int) -> float:  # noqa: ARG001 - a stage has one rank
        return sum(seconds[part.kind, part.stage] for part in instruction.parts)

    def of_hop(send: Instruction, source: int, target: int) -> tuple[float, float]:  # noqa: ARG001 - all values alike
        hop = hops[min(source, target), max(source, target)]
        return hop, hop if occupies else 0.0

    return Prices(seconds=of, hop_seconds=of_hop, held=lambda _: (0.0, 0.0))


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from(sorted(SCHEDULES)))
def test_whatever_the_times_no_transfer_waits_for_its_receive(data: st.DataObject, name: str) -> None:
    lowered = insert_communication(SCHEDULES[name])
    trace = play(lowered, data.draw(st.composite(random_prices)(lowered)))
    needs = Needs(lowered)
    free_at: dict[tuple[int, int | None], float] = {}
    for node, event in enumerate(trace.events):
        if event.lane is Lane.SEND:
            link = (event.rank, event.peer)
            (maker,) = needs.before[node]
            made = trace.events[maker].end
            assert event.start in (made, free_at.get(link, 0.0))
            assert event.start <= max(made, free_at.get(link, 0.0))
            free_at[link] = max(free_at.get(link, 0.0), event.end)


def test_a_reduction_between_ranks_that_still_waits_does_not_make_a_transfer_wait_too() -> None:
    # Rank 0 goes on from its last 4B1 to 2B0 without waiting for the tie of stages 3 and 4 to meet, though its
    # reduction waits for a slow 3B1. So the gradient of 2B0 may leave while rank 1 is still at 3B1.
    schedule = written(
        loop(2, 3).with_ties((3, 4)),
        "0F0 2F0 4F0 0F1 2F1 4F1 4B0 4B1 2B0 2B1 0B0 0B1",
        "1F0 3F0 5F0 1F1 3F1 5F1 5B0 5B1 3B0 3B1 1B0 1B1",
        num_microbatches=2,
    )

    def seconds(instruction: Instruction, rank: int) -> float:  # noqa: ARG001 - a stage has one rank
        return 10.0 if str(instruction) == "3B1" else 1.0

    prices = Prices(seconds=seconds, hop_seconds=lambda *_: (0.5, 0.0), held=lambda _: (0.0, 0.0))
    trace = simulate(insert_steps(schedule), prices)
    assert event_of(trace, "2SEND_B0>1").start == event_of(trace, "2B0").end < event_of(trace, "3B1").end


def most_open_receives(schedule: Schedule) -> int:
    """The most receives that a rank has posted and not yet read, at any place of its list."""
    most = 0
    needs = Needs(schedule)
    for rank, order in enumerate(schedule.orders):
        first, posted = needs.first_node[rank], set[int]()
        for node in range(first, first + len(order)):
            if needs.nodes[node].kind in RECEIVES:
                posted.add(node)
            posted -= set(needs.before[node])
            most = max(most, len(posted))
    return most


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name not in ("gpipe", "looped-bfs")])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_open_receives_of_a_rank_depend_on_the_ranks_and_not_on_the_microbatches(name: str, num_ranks: int) -> None:
    few, many = (most_open_receives(lower(make_schedule(name, num_ranks, rounds * num_ranks))) for rounds in (4, 8))
    assert few == many <= 4 * num_ranks


def test_a_tie_between_ranks_does_not_post_receives_any_sooner() -> None:
    plain, tied = make_schedule("interleaved", 4, 8), SCHEDULES["interleaved with a tie"]
    assert most_open_receives(insert_communication(tied)) == most_open_receives(insert_communication(plain))


def test_gpipe_posts_at_once_all_that_may_come_at_once() -> None:
    assert most_open_receives(lower(make_schedule("gpipe", 4, 16))) == 16


def test_the_picture_of_the_communication_pass_is_true() -> None:
    lowered = insert_communication(written(loop(2), "0F0 0F1 0B0", "1F0 1B0 1F1", num_microbatches=2))
    assert texts(lowered) == [
        "0F0 0SEND_F0>1 0RECV_B0<1 0F1 0SEND_F1>1 0B0",
        "1RECV_F0<0 1RECV_F1<0 1F0 1B0 1SEND_B0>0 1F1",
    ]


def test_a_schedule_that_communicates_comes_back_as_it_is() -> None:
    lowered = insert_communication(make_schedule("1f1b", 3, 4))
    assert insert_communication(lowered) is lowered


def test_a_single_rank_has_nothing_to_send() -> None:
    schedule = make_schedule("interleaved", 1, 3)
    assert insert_communication(schedule) is schedule


def test_the_transfers_of_a_pair_stand_behind_the_pair() -> None:
    lowered = insert_communication(written(vee(2), "0F0 3F0 0F1&3B0", "1F0 2F0 2B0", num_microbatches=2))
    assert texts(lowered)[0].endswith("0F1&3B0 0SEND_F1>1 3SEND_B0>2")


# Backwards


@pytest.mark.parametrize("name", CATALOGUE)
def test_splitting_takes_every_backward_apart_once_and_leaves_the_rest(name: str) -> None:
    schedule = make_schedule(name, 4, 8)
    apart = split_backward(schedule)
    for order, split in zip(schedule.orders, apart.orders, strict=True):
        parts = [part for each in order for part in each.parts]
        assert len(split) == len(parts) + sum(part.kind is Kind.B for part in parts)
        assert [each for each in split if each.kind is Kind.F] == [part for part in parts if part.kind is Kind.F]
        assert not any(each.kind is Kind.B for each in split)
    assert split_backward(apart) == apart


def test_a_pair_is_taken_apart_into_its_three_parts() -> None:
    assert texts(split_backward(written(vee(1), "0F1&1B0 1F1&0I0 0W0", num_microbatches=2))) == [
        "0F1 1I0 1W0 1F1 0I0 0W0"
    ]


@pytest.mark.parametrize("name", CATALOGUE)
def test_splitting_makes_no_schedule_slower(name: str) -> None:
    schedule = make_schedule(name, 4, 8)
    apart = played_schedule(split_backward(schedule), (1, 1.25, 0.75), hop=0.125)
    assert apart.makespan <= played_schedule(schedule, (1, 1.25, 0.75), hop=0.125).makespan


# Steps


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_stage_takes_its_step_once(name: str) -> None:
    schedule = insert_steps(make_schedule(name, 4, 8), reduce_gradients=True)
    for kind in (Kind.STEP, Kind.REDUCE):
        found = [
            (each.stage, each.microbatch)
            for order in schedule.orders
            for each in order
            if each.kind is kind and each.peer is None
        ]
        every = [(stage, step) for stage in range(schedule.placement.num_stages) for step in range(schedule.num_steps)]
        assert sorted(found) == every
    simulate(schedule, even_prices(schedule.placement))


def test_a_reduction_stands_directly_behind_the_last_gradient_and_the_steps_come_last() -> None:
    schedule = insert_steps(written(vee(1), "0F0 1F0 1B0 0I0 0W0"), reduce_gradients=True)
    assert texts(schedule) == ["0F0 1F0 1B0 1REDUCE0 0I0 0W0 0REDUCE0 1STEP0 0STEP0"]


def test_without_replicas_only_steps_are_added() -> None:
    assert texts(insert_steps(written(loop(2), "0F0 0B0", "1F0 1B0"))) == ["0F0 0B0 0STEP0", "1F0 1B0 1STEP0"]


def test_gradients_meet_over_a_tie_before_they_are_reduced_over_replicas() -> None:
    schedule = insert_steps(written(loop(2).with_ties((0, 1)), "0F0 0B0", "1F0 1B0"), reduce_gradients=True)
    assert texts(schedule) == ["0F0 0B0 0REDUCE0~0 0REDUCE0 0STEP0", "1F0 1B0 1REDUCE0~0 1REDUCE0 1STEP0"]


def test_a_stage_in_two_ties_meets_both() -> None:
    placement = loop(3).with_ties((0, 2), (1, 2))
    schedule = insert_steps(written(placement, "0F0 0B0", "1F0 1B0", "2F0 2B0"))
    assert texts(schedule)[2] == "2F0 2B0 2REDUCE0~0 2REDUCE0~1 2STEP0"
    assert texts(schedule)[1] == "1F0 1B0 1REDUCE0~1 1STEP0"


def test_ranks_that_share_two_ties_reduce_them_in_one_order() -> None:
    """Rank 0 is done with the second tie first (stage 2), rank 1 with the first (stage 3): each would wait for ever."""
    schedule = insert_steps(with_ties(make_schedule("interleaved", 2, 4), (0, 3), (1, 2)))
    verify(lower(schedule))
    for order in schedule.orders:
        assert [each.peer for each in order if each.kind is Kind.REDUCE] == [0, 1]


def test_the_steps_that_pipedream_places_itself_stay_where_they_are() -> None:
    schedule = pipedream_2bw(3, 4)
    assert insert_steps(schedule) == schedule
    reduced = insert_steps(schedule, reduce_gradients=True)
    assert "2B3 2REDUCE0 2STEP0" in texts(reduced)[2]


def test_every_step_of_several_stands_behind_its_own_gradients() -> None:
    schedule = written(loop(1), "0F0 0B0 0F1 0B1 0F2 0B2", num_steps=3)
    assert texts(insert_steps(schedule)) == ["0F0 0B0 0STEP0 0F1 0B1 0STEP1 0F2 0B2 0STEP2"]


def test_lowering_adds_steps_and_transfers() -> None:
    assert texts(lower(written(loop(2), "0F0 0B0", "1F0 1B0"))) == [
        "0F0 0SEND_F0>1 0RECV_B0<1 0B0 0STEP0",
        "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1STEP0",
    ]


# Gathers


def check_gathers(schedule: Schedule, max_gathered: int) -> int:
    """Walk the lists: what computes is gathered, no more than allowed are, and each is released. Count the gathers."""
    count = 0
    for order in schedule.orders:
        gathered: dict[int, int] = {}
        last: dict[int, int] = {}
        for instruction in order:
            if instruction.kind is Kind.GATHER:
                assert instruction.stage not in gathered
                assert instruction.microbatch == last.get(instruction.stage, -1) + 1
                gathered[instruction.stage] = last[instruction.stage] = instruction.microbatch
                assert len(gathered) <= max_gathered
                count += 1
            elif instruction.kind is Kind.RELEASE:
                assert gathered.pop(instruction.stage) == instruction.microbatch
            elif instruction.kind in (Kind.F, Kind.B, Kind.I, Kind.W):
                assert all(part.stage in gathered for part in instruction.parts)
        assert not gathered
    return count


@pytest.mark.parametrize("max_gathered", [1, 2, 3])
@pytest.mark.parametrize("name", CATALOGUE)
def test_a_stage_is_gathered_whenever_it_computes_and_never_too_many_are(name: str, max_gathered: int) -> None:
    if max_gathered == 1 and name.startswith("dualpipe"):
        return
    for schedule in (make_schedule(name, 4, 8), lower(make_schedule(name, 4, 8))):
        sharded = insert_gathers(schedule, max_gathered=max_gathered)
        check_gathers(sharded, max_gathered)
        simulate(sharded, even_prices(sharded.placement))


def test_the_picture_of_the_sharding_pass_is_true() -> None:
    schedule = written(loop(1, 3), "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", num_microbatches=2)
    assert texts(insert_gathers(schedule, max_gathered=2)) == [
        "0GATHER0 2GATHER0 0F0 0F1 2F0 2F1 2B0 2B1 2RELEASE0 0B0 0B1 0RELEASE0"
    ]


def test_a_gather_is_issued_as_soon_as_there_is_room() -> None:
    schedule = written(loop(1, 3), "0F0 0F1 1F0 1F1 2F0 2F1", num_microbatches=2)
    assert texts(insert_gathers(schedule, max_gathered=1)) == [
        "0GATHER0 0F0 0F1 0RELEASE0 1GATHER0 1F0 1F1 1RELEASE0 2GATHER0 2F0 2F1 2RELEASE0"
    ]
    assert texts(insert_gathers(schedule, max_gathered=2)) == [
        "0GATHER0 1GATHER0 0F0 0F1 0RELEASE0 2GATHER0 1F0 1F1 1RELEASE0 2F0 2F1 2RELEASE0"
    ]


def fewest_gathers(stages: tuple[int, ...], max_gathered: int) -> int:
    """By trying every choice of what to let go."""

    @cache
    def fewest(position: int, gathered: frozenset[int]) -> int:
        if position == len(stages):
            return 0
        stage = stages[position]
        if stage in gathered:
            return fewest(position + 1, gathered)
        if len(gathered) < max_gathered:
            return 1 + fewest(position + 1, gathered | {stage})
        return 1 + min(fewest(position + 1, gathered - {leaving} | {stage}) for leaving in gathered)

    return fewest(0, frozenset())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(min_value=0, max_value=4), min_size=1, max_size=14), st.integers(min_value=1, max_value=3))
def test_no_other_choice_gathers_less_often(stages: list[int], max_gathered: int) -> None:
    placement = Placement(ranks=(0,) * 5, pipes=(tuple(range(5)),))
    order = [forward(stage, microbatch) for microbatch, stage in enumerate(stages)]
    sharded = insert_gathers(Schedule.of("any", placement, len(stages), [order]), max_gathered=max_gathered)
    assert check_gathers(sharded, max_gathered) == fewest_gathers(tuple(stages), max_gathered)


def gather_prices(schedule: Schedule, gather: float) -> Prices:
    plain = even_prices(schedule.placement, UNIT)

    def seconds(instruction: Instruction, rank: int) -> float:
        return gather if instruction.kind is Kind.GATHER else plain.seconds(instruction, rank)

    return replace(plain, seconds=seconds)


@pytest.mark.parametrize("num_chunks", [2, 3, 4])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_with_two_gathered_at_a_time_only_the_first_gather_of_looped_breadth_first_is_seen(
    num_chunks: int, num_ranks: int, share: float
) -> None:
    num_microbatches = 2 * num_ranks
    schedule = make_schedule("looped-bfs", num_ranks, num_microbatches, num_chunks)
    # A gather may take as long as the forwards of one chunk.
    gather = share * num_microbatches / num_chunks
    sharded = insert_gathers(schedule, max_gathered=2)
    makespan = simulate(sharded, gather_prices(schedule, gather)).makespan
    assert makespan == pytest.approx(played_schedule(schedule).makespan + gather)


def test_with_one_gathered_at_a_time_every_gather_is_seen() -> None:
    schedule = make_schedule("looped-bfs", 1, 4, 3)
    sharded = insert_gathers(schedule, max_gathered=1)
    # Chunks 0, 1 and 2 forward, 1 and 0 again backward; chunk 2 is still there.
    assert simulate(sharded, gather_prices(schedule, 0.5)).makespan == pytest.approx(12 + 5 * 0.5)


@pytest.mark.parametrize(
    ("name", "max_gathered", "problem", "remedy"),
    [
        ("1f1b", 0, "0 gathered stages at a time: the schedule computes on 1 at once", "max_gathered=1"),
        ("dualpipe-v", 1, "1 gathered stages at a time: the schedule computes on 2 at once", "max_gathered=2"),
        ("dualpipe-v", 0, "0 gathered stages at a time: the schedule computes on 2 at once", "max_gathered=2"),
    ],
)
def test_too_little_room_to_compute_at_all_is_refused(name: str, max_gathered: int, problem: str, remedy: str) -> None:
    with pytest.raises(ShardwiseError) as caught:
        insert_gathers(make_schedule(name, 2, 4), max_gathered=max_gathered)
    assert (caught.value.problem, caught.value.remedy) == (problem, remedy)


# Offloading


def offload_prices(schedule: Schedule, seconds_each_way: float) -> Prices:
    plain = even_prices(schedule.placement, UNIT)

    def seconds(instruction: Instruction, rank: int) -> float:
        if instruction.kind in (Kind.OFFLOAD, Kind.RELOAD):
            return seconds_each_way
        return plain.seconds(instruction, rank)

    return replace(plain, seconds=seconds)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h2", "zb-v", "dualpipe-v"])
def test_offloading_over_a_fast_link_takes_memory_away_and_no_time(name: str) -> None:
    schedule = make_schedule(name, 4, 8)
    trace = simulate(insert_offloads(schedule), offload_prices(schedule, 1e-9))
    plain = played_schedule(schedule)
    assert trace.makespan == pytest.approx(plain.makespan)
    assert all(less <= more + 1e-9 for less, more in zip(peaks(trace), peaks(plain), strict=True))
    assert peaks(trace)[0] < peaks(plain)[0]


def test_gpipe_with_everything_offloaded_holds_one_that_computes_one_that_leaves_and_one_that_comes() -> None:
    schedule = make_schedule("gpipe", 2, 8)
    trace = simulate(insert_offloads(schedule), offload_prices(schedule, 0.5))
    assert peaks(trace) == (3, 3)


def test_a_reload_is_issued_one_computation_before_its_backward() -> None:
    schedule = written(loop(1), "0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0", num_microbatches=4)
    offloaded = insert_offloads(schedule, which=lambda each: each.microbatch == 0)
    assert texts(offloaded) == ["0F0 0OFFLOAD0 0F1 0F2 0F3 0B3 0B2 0RELOAD0 0B1 0B0"]


def test_nothing_is_reloaded_before_it_has_left() -> None:
    schedule = written(loop(1), "0F0 0F1 0B1 0B0", num_microbatches=2)
    assert texts(insert_offloads(schedule)) == ["0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RELOAD1 0RELOAD0 0B1 0B0"]


def test_an_offload_of_one_half_of_a_pair_stands_behind_the_pair() -> None:
    schedule = written(vee(1), "0F0 1F0 0F1&1B0 1F1 0B0 1B1 0B1", num_microbatches=2)
    offloaded = insert_offloads(schedule, which=lambda each: each == forward(0, 1))
    assert texts(offloaded) == ["0F0 1F0 0F1&1B0 0OFFLOAD1 1F1 0B0 0RELOAD1 1B1 0B1"]
