"""The verifier against damage: what it lets through must play to its end and compute everything in the right order.

What that is, is said here once more and independently: from the placement and the times of the trace alone.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random

import pytest

from shardwise.schedule.catalogue import make_schedule
from shardwise.schedule.instruction import RECEIVES, SENDS, Instruction, Kind, parse
from shardwise.schedule.needs import Needs
from shardwise.schedule.passes.communication import insert_communication
from shardwise.schedule.passes.lower import lower
from shardwise.schedule.passes.offload import insert_offloads
from shardwise.schedule.passes.sharding import insert_gathers
from shardwise.schedule.passes.steps import insert_steps
from shardwise.schedule.prices import Prices
from shardwise.schedule.schedule import Schedule
from shardwise.schedule.simulate import play
from shardwise.schedule.verify import InvalidScheduleError, verify
from tests.schedule.playing import texts, written

Orders = list[list[Instruction]]
#: Damages the orders, or says with False that it found nothing to damage.
Mutation = Callable[[Orders, Random, Schedule], bool]


def with_a_skip_and_a_tie() -> Schedule:
    plain = make_schedule("zb-h1", 3, 4)
    placement = plain.placement.with_skips((0, 2)).with_ties((0, 2))
    return insert_communication(
        insert_steps(written(placement, *texts(plain), num_microbatches=4), reduce_gradients=True)
    )


SCHEDULES = {
    "1f1b": lower(make_schedule("1f1b", 3, 4)),
    "interleaved": lower(make_schedule("interleaved", 2, 4)),
    "zb-v": lower(make_schedule("zb-v", 2, 3)),
    "dualpipe-v": lower(make_schedule("dualpipe-v", 2, 4)),
    "chimera": lower(make_schedule("chimera", 2, 4)),
    "pipedream-2bw": lower(make_schedule("pipedream-2bw", 2, 2)),
    "gathered": lower(insert_gathers(make_schedule("interleaved", 2, 4, 3), max_gathered=2)),
    "offloaded": lower(insert_offloads(make_schedule("gpipe", 2, 4))),
    "skip and tie": with_a_skip_and_a_tie(),
}

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


def drop_one(orders: Orders, random: Random, _: Schedule) -> bool:
    order = random.choice(orders)
    del order[random.randrange(len(order))]
    return True


def repeat_one(orders: Orders, random: Random, _: Schedule) -> bool:
    order = random.choice(orders)
    order.insert(random.randrange(len(order) + 1), random.choice(order))
    return True


def change_a_number(orders: Orders, random: Random, _: Schedule) -> bool:
    order = random.choice(orders)
    position = random.randrange(len(order))
    old, number = order[position], random.randrange(6)
    changed = [old._replace(stage=number), old._replace(microbatch=number)]
    order[position] = random.choice(changed if old.peer is None else [*changed, old._replace(peer=number)])
    return True


def swap_neighbours_that_depend_on_each_other(orders: Orders, random: Random, schedule: Schedule) -> bool:
    needs = Needs(schedule)
    rank = random.randrange(len(orders))
    first = needs.first_node[rank]
    found = [place for place in range(len(orders[rank]) - 1) if first + place in needs.before[first + place + 1]]
    if not found:
        return False
    place = random.choice(found)
    orders[rank][place : place + 2] = orders[rank][place : place + 2][::-1]
    return True


def exchange_two_receives_of_a_link(orders: Orders, random: Random, schedule: Schedule) -> bool:
    rank, ranks = random.randrange(len(orders)), schedule.placement.ranks
    links: dict[int, list[int]] = {}
    for position, each in enumerate(orders[rank]):
        if each.kind in RECEIVES and each.peer is not None:
            links.setdefault(ranks[each.peer], []).append(position)
    link = random.choice(sorted(links))
    one, other = random.sample(links[link], 2)
    orders[rank][one], orders[rank][other] = orders[rank][other], orders[rank][one]
    return True


def release_before_the_last_use(orders: Orders, random: Random, _: Schedule) -> bool:
    order = random.choice(orders)
    found = [position for position, each in enumerate(order) if each.kind is Kind.RELEASE]
    if not found:
        return False
    release = order.pop(random.choice(found))
    used = [
        position
        for position, each in enumerate(order)
        if any(part.stage == release.stage and part.kind in (Kind.F, Kind.B, Kind.I, Kind.W) for part in each.parts)
    ]
    order.insert(random.choice(used), release)
    return True


def drop_a_tied_reduction(orders: Orders, random: Random, _: Schedule) -> bool:
    found = [(order, each) for order in orders for each in order if each.kind is Kind.REDUCE and each.peer is not None]
    if not found:
        return False
    order, reduction = random.choice(found)
    order.remove(reduction)
    return True


def move_one(orders: Orders, random: Random, _: Schedule) -> bool:
    order = random.choice(orders)
    order.insert(random.randrange(len(order)), order.pop(random.randrange(len(order))))
    return True


def move_a_transfer(orders: Orders, random: Random, _: Schedule) -> bool:
    order = random.choice(orders)
    transfers = [position for position, each in enumerate(order) if each.kind in SENDS or each.kind in RECEIVES]
    position = random.choice(transfers)
    moved = order.pop(position)
    order.insert(max(0, min(len(order), position + random.choice([-3, -2, -1, 1, 2, 3]))), moved)
    return True


def swap_two_computations(orders: Orders, random: Random, _: Schedule) -> bool:
    order = random.choice(orders)
    computed = [position for position, each in enumerate(order) if each.kind in (Kind.F, Kind.B, Kind.I, Kind.W)]
    one, other = random.sample(computed, 2)
    order[one], order[other] = order[other], order[one]
    return True


#: What no schedule survives, and what it may survive.
FATAL: tuple[Mutation, ...] = (
    drop_one,
    repeat_one,
    change_a_number,
    swap_neighbours_that_depend_on_each_other,
    exchange_two_receives_of_a_link,
    release_before_the_last_use,
    drop_a_tied_reduction,
)
PERHAPS_HARMLESS: tuple[Mutation, ...] = (move_one, move_a_transfer, swap_two_computations)


def mutants(schedule: Schedule, mutation: Mutation, count: int) -> Iterator[Schedule]:
    random = Random(f"{schedule.name} {mutation.__name__}")
    for _ in range(count):
        orders = [list(order) for order in schedule.orders]
        if mutation(orders, random, schedule):
            mutant = schedule.with_orders(orders)
            if mutant != schedule:
                yield mutant


@pytest.mark.parametrize("mutation", FATAL)
@every_schedule
def test_what_makes_a_schedule_wrong_is_refused(schedule: Schedule, mutation: Mutation) -> None:
    verify(schedule)
    for mutant in mutants(schedule, mutation, 40):
        assert is_refused(mutant), "\n".join(texts(mutant))


@pytest.mark.parametrize("mutation", PERHAPS_HARMLESS)
@every_schedule
def test_what_is_not_refused_plays_to_its_end_and_computes_everything(schedule: Schedule, mutation: Mutation) -> None:
    check_computes_everything(schedule)
    for mutant in mutants(schedule, mutation, 60):
        if not is_refused(mutant):
            check_computes_everything(mutant)


@pytest.mark.parametrize("mutation", PERHAPS_HARMLESS)
def test_a_move_is_sometimes_refused_and_sometimes_not(mutation: Mutation) -> None:
    refused = [is_refused(mutant) for schedule in SCHEDULES.values() for mutant in mutants(schedule, mutation, 10)]
    assert set(refused) == {True, False}


def test_the_check_of_this_file_sees_what_is_missing_and_what_is_out_of_order() -> None:
    schedule = SCHEDULES["zb-v"]
    dropped = (parse("1W2"), parse("1STEP0"))
    without = schedule.with_orders([[each for each in order if each not in dropped] for order in schedule.orders])
    with pytest.raises(KeyError):
        check_computes_everything(without)
    with pytest.raises(AssertionError, match="0F0 starts before 0F1 has ended"):
        _Played(schedule).check_order(parse("0F1"), parse("0F0"))


def is_refused(schedule: Schedule) -> bool:
    try:
        verify(schedule)
    except InvalidScheduleError:
        return True
    return False


def uneven_prices() -> Prices:
    """Every instruction takes another time, so that nothing is in order by luck."""
    random = Random(7)
    seconds = {(kind, stage): random.uniform(0.5, 2) for kind in Kind for stage in range(16)}
    return Prices(
        seconds=lambda each, _: seconds[each.kind, each.stage],
        hop_seconds=lambda send, *_: (seconds[send.kind, send.stage] / 3, 0.0),
        held=lambda _: (0.0, 0.0),
    )


class _Played:
    """When everything that an instruction makes was there."""

    def __init__(self, schedule: Schedule) -> None:
        trace = play(schedule, uneven_prices())
        self.start: dict[Instruction, float] = {}
        self.end: dict[Instruction, float] = {}
        for event in trace.events:
            for part in parse(event.name).parts:
                kinds = (Kind.I, Kind.W) if part.kind is Kind.B else (part.kind,)
                for made in (part._replace(kind=kind) for kind in kinds):
                    assert made not in self.start, f"{made} is done twice"
                    self.start[made], self.end[made] = event.start, event.end

    def check_order(self, first: Instruction, second: Instruction) -> None:
        whole = first.kind is Kind.I and second.kind is Kind.W and self.start[first] == self.start[second]
        assert whole or self.end[first] <= self.start[second] + 1e-9, f"{second} starts before {first} has ended"


def check_computes_everything(schedule: Schedule) -> None:
    played, placement = _Played(schedule), schedule.placement
    for microbatch in range(schedule.total_microbatches):
        for stage in placement.pipe(microbatch):
            ahead, back, weights = (Instruction(kind, stage, microbatch) for kind in (Kind.F, Kind.I, Kind.W))
            played.check_order(ahead, back)
            played.check_order(back, weights)
            for source in placement.sources[stage]:
                check_value(played, schedule, Instruction(Kind.F, source, microbatch), ahead)
                check_value(played, schedule, back, Instruction(Kind.I, source, microbatch))
            check_step(played, schedule, weights)
    check_computation_runs_one_after_the_other(played, schedule)
    check_parameters_are_there(schedule)
    check_saved_values_are_there(played)


def check_value(played: _Played, schedule: Schedule, maker: Instruction, user: Instruction) -> None:
    ranks = schedule.placement.ranks
    played.check_order(maker, user)
    if ranks[maker.stage] == ranks[user.stage]:
        return
    kinds = (Kind.SEND_F, Kind.RECV_F) if maker.kind is Kind.F else (Kind.SEND_B, Kind.RECV_B)
    send = Instruction(kinds[0], maker.stage, maker.microbatch, user.stage)
    receive = Instruction(kinds[1], user.stage, user.microbatch, maker.stage)
    played.check_order(maker, send)
    played.check_order(receive, user)
    assert played.end[send] == played.end[receive]


def check_step(played: _Played, schedule: Schedule, weights: Instruction) -> None:
    step = schedule.step_of(weights.microbatch)
    for number, tie in enumerate(schedule.placement.ties):
        for stage in tie:
            if weights.stage in tie:
                reduction = Instruction(Kind.REDUCE, stage, step, number)
                played.check_order(weights, reduction)
                played.check_order(reduction, Instruction(Kind.STEP, stage, step))
    played.check_order(weights, Instruction(Kind.STEP, weights.stage, step))
    if step > schedule.staleness:
        made_by = Instruction(Kind.STEP, weights.stage, step - 1 - schedule.staleness)
        played.check_order(made_by, weights._replace(kind=Kind.F))


def check_computation_runs_one_after_the_other(played: _Played, schedule: Schedule) -> None:
    for order in schedule.orders:
        computed = [each for each in order if each.kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.STEP)]
        for first, second in pairwise(computed):
            ended, started = (
                each._replace(kind=Kind.I, beside=None) if each.kind is Kind.B else each._replace(beside=None)
                for each in (first, second)
            )
            assert played.end[ended] <= played.start[started] + 1e-9


def check_parameters_are_there(schedule: Schedule) -> None:
    for order in schedule.orders:
        sharded = {each.stage for each in order if each.kind is Kind.GATHER}
        here: set[int] = set()
        for each in order:
            if each.kind is Kind.GATHER:
                here.add(each.stage)
            elif each.kind is Kind.RELEASE:
                here.remove(each.stage)
            elif each.kind in (Kind.F, Kind.B, Kind.I, Kind.W):
                assert {part.stage for part in each.parts} & sharded <= here
        assert not here


def check_saved_values_are_there(played: _Played) -> None:
    for each in list(played.start):
        if each.kind is Kind.OFFLOAD:
            played.check_order(each._replace(kind=Kind.F), each)
            played.check_order(each, each._replace(kind=Kind.RELOAD))
            played.check_order(each._replace(kind=Kind.RELOAD), each._replace(kind=Kind.I))
