"""Where ranks sit: the best of all arrangements on small clusters, and never worse than the plain order."""

from itertools import permutations

import numpy as np
import pytest

from shardwise import environment
from shardwise.cli import main
from shardwise.cluster.cluster import Cluster
from shardwise.cluster.pairs import Pairs
from shardwise.planner.placement.seats import Seats, seats_for, take_seats
from shardwise.planner.placement.traffic import edges_of, step_bytes_of
from shardwise.planner.placement.ways import Ways, ways_of
from shardwise.planner.plan import Plan
from shardwise.planner.question import make_question

PLANS = (
    "tp=2,dp=2", "tp=2,pp=2", "dp=2,pp=3,microbatches=4", "tp=2,dp=3", "tp=6", "pp=5,microbatches=8", "dp=4,ep=2",
    "tp=2,cp=2", "dp=2,ep=2,pp=3,microbatches=4", "tp=3,dp=2,order=dp-pp-cp-tp", "pp=2,chunks=2,schedule=interleaved,"
    "microbatches=4,tp=3", "dp=7",
)  # fmt: skip


def messages(plan: Plan) -> dict[str, set[tuple[int, int]]]:
    """Who talks with whom, written down from what a rank's number means: ((pp * DP + dp) * CP + cp) * TP + tp."""
    sizes = {"pp": plan.pp, "dp": plan.num_ranks // (plan.pp * plan.cp * plan.tp), "cp": plan.cp, "tp": plan.tp}
    places = {}
    for rank in range(plan.num_ranks):
        left, place = rank, {}
        for axis in reversed(plan.order.split("-")):
            left, place[axis] = divmod(left, sizes[axis])
        places[rank] = place
    found: dict[str, set[tuple[int, int]]] = {axis: set() for axis in ("tp", "cp", "dp", "pp", "ep")}
    for a, mine in places.items():
        for b, theirs in places.items():
            other = {axis for axis in sizes if mine[axis] != theirs[axis]}
            for axis in ("tp", "cp", "pp"):
                near = theirs[axis] - mine[axis] == 1
                wraps = axis != "pp" or (plan.num_stages or plan.pp) > plan.pp
                if other == {axis} and (near or (wraps and theirs[axis] == 0 and mine[axis] == sizes[axis] - 1)):
                    found[axis].add((a, b))
            replica = [place["dp"] * sizes["cp"] + place["cp"] for place in (mine, theirs)]
            count = sizes["dp"] * sizes["cp"]
            if other and other <= {"dp", "cp"} and replica[1] == (replica[0] + 1) % count:
                found["dp"].add((a, b))
            if other and other <= {"dp", "cp"} and replica[0] // plan.ep == replica[1] // plan.ep:
                found["ep"].add((a, b))
    return {axis: pairs for axis, pairs in found.items() if pairs}


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.whole) for seed in range(12, 200))]
)
def test_no_arrangement_of_a_small_cluster_is_better(seed: int) -> None:
    chance = np.random.default_rng(seed)
    plan = Plan.parse(PLANS[seed % len(PLANS)])
    count = plan.num_ranks
    matrix = chance.choice([1.0, 2.0, 4.0, 10.0], size=(count, count)) * chance.uniform(0.9, 1.1, (count, count))
    matrix = np.maximum(matrix, matrix.T)
    ways = Ways(domain=np.arange(count) // 2, inside=np.ones(count), across=np.ones(count), matrix=matrix)
    num_bytes = {axis: float(chance.choice([0.0, 1.0, 5.0, 20.0])) for axis in ("tp", "cp", "dp", "pp", "ep")}
    seats = take_seats(plan, num_bytes, ways)
    talk = messages(plan)

    def seconds(devices: tuple[int, ...]) -> float:
        slowest = {axis: max(matrix[devices[a], devices[b]] for a, b in pairs) for axis, pairs in talk.items()}
        return float(sum(num_bytes[axis] * slow for axis, slow in slowest.items()))

    assert sorted(seats.devices) == list(range(count))
    assert seats.seconds == pytest.approx(seconds(seats.devices))
    assert seats.plain_seconds == pytest.approx(seconds(tuple(range(count))))
    assert seats.seconds == pytest.approx(min(map(seconds, permutations(range(count)))))


def shuffled(count: int, size: int, seed: int) -> Pairs:
    """Groups of neighbours whose devices are numbered in no order."""
    label = np.random.default_rng(seed).permutation(count) // size
    rates = np.where(label[:, None] == label[None, :], 100e9, 10e9)
    return Pairs(
        hosts=tuple(f"host{each}" for each in label), devices=("cuda:0",) * count,
        bytes_per_second=tuple(map(tuple, rates.tolist())), latency_seconds=((1e-5,) * count,) * count,
    )  # fmt: skip


@pytest.mark.parametrize(
    "text", ["tp=4,dp=8", "tp=4,pp=4,dp=2,microbatches=4", "tp=4,dp=16", "tp=2,pp=8,microbatches=8"]
)
def test_tensor_groups_come_together_where_devices_are_numbered_in_no_order(text: str) -> None:
    plan = Plan.parse(text)
    pairs = shuffled(plan.num_ranks, 4, seed=3)
    cluster = Cluster(pools=Cluster.parse(f"{plan.num_ranks // 4}x4xh100").pools, pairs=pairs)
    num_bytes = {"tp": 50.0, "dp": 5.0, "pp": 1.0}
    seats = take_seats(plan, num_bytes, ways_of(cluster))
    tensor = next(each for each in edges_of(plan, num_bytes) if each.axis == "tp")
    on = np.array(seats.devices)
    assert all(pairs.hosts[a] == pairs.hosts[b] for a, b in zip(on[tensor.senders], on[tensor.receivers], strict=True))
    assert seats.seconds < seats.plain_seconds / 2
    assert not seats.is_plain


@pytest.mark.parametrize("seed", range(10))
def test_it_is_never_slower_than_the_plain_order_which_stays_where_nothing_is_better(seed: int) -> None:
    chance = np.random.default_rng(seed)
    plan = Plan.parse(["tp=4,dp=4", "pp=4,dp=4,microbatches=4", "tp=2,dp=4,ep=2,pp=2,microbatches=2"][seed % 3])
    rates = chance.uniform(1e9, 50e9, (16, 16))
    matrix = 1 / np.minimum(rates, rates.T)
    ways = Ways(domain=np.arange(16) // 4, inside=np.ones(16), across=np.ones(16), matrix=matrix)
    seats = take_seats(plan, {"tp": 1e9, "dp": 1e8, "pp": 1e7, "ep": 1e8}, ways)
    assert seats.seconds <= seats.plain_seconds
    alike = Ways(domain=np.zeros(16, dtype=np.int64), inside=np.ones(16), across=np.ones(16))
    assert take_seats(plan, {"tp": 1e9, "dp": 1e8}, alike).is_plain


def test_a_link_carries_what_its_ranks_send() -> None:
    question = make_question("llama3-8b", cluster="2x4xh100", batch=16, sequence=4096)
    plan = Plan.parse("dp=2,tp=4,microbatches=2,precision=bf16")
    # An all-reduce around a ring of n moves 2(n-1)/n of an array on every link; forward and backward, two sums in each
    # of 32 layers, one more for the embedding; 2 microbatches of 4 rows.
    num_bytes = step_bytes_of(question, plan)
    one_sum = 4 * 4096 * 4096 * 2
    assert num_bytes["tp"] == pytest.approx(2 * 0.75 * 2 * (2 * 32) * one_sum * 2, rel=0.03)
    seats = seats_for(question, plan)
    carried = {(use.sender, use.receiver): use.num_bytes for use in seats.uses}
    assert carried[0, 1] == {"tp": num_bytes["tp"]}
    assert carried[0, 4] == {"dp": num_bytes["dp"]}
    assert isinstance(seats, Seats)


def test_fit_draws_where_ranks_sit(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", "llama3-8b", "--cluster", "2x8xh100", "--plan", "dp=2,tp=8,zero=1,precision=bf16", "--placement"]
    assert main(words) == 0
    drawn = capsys.readouterr().out
    assert "ranks sit in plain order: no other is better" in drawn
    assert "devices 8-15: ranks 8 9 10 11 12 13 14 15" in drawn
    assert "0 to 8   apart  dp 2.0 GB" in drawn


def test_a_rank_takes_the_device_of_its_seat_and_a_device_knows_its_rank() -> None:
    assert [environment.device_of(rank) for rank in range(3)] == [0, 1, 2]
    with environment.seated((2, 0, 1)):
        assert [environment.device_of(rank) for rank in range(3)] == [2, 0, 1]
        assert [environment.rank_on(environment.device_of(rank)) for rank in range(3)] == [0, 1, 2]
    with environment.seated(None):
        assert environment.rank_on(2) == 2
