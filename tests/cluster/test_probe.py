"""What a probe makes of numbers: lines, curves, neighbours, what is slow, and a cluster that the planner takes."""

from dataclasses import replace

import numpy as np
import pytest

from shardwise.cluster.cluster import Cluster
from shardwise.cluster.curve import COLLECTIVES, Curve, bus_factor
from shardwise.cluster.file import from_toml, to_toml
from shardwise.cluster.line import fit_line
from shardwise.cluster.pairs import Pairs, kinds_of_links, levels, neighbours, slow_devices, slow_in_links, slow_links
from shardwise.cluster.probe import DeviceFigures, Probe
from shardwise.cluster.probed import cluster_of
from shardwise.cost.collective import Wires
from shardwise.errors import ShardwiseError

SIZES = (4096, 65536, 2**20, 2**24, 2**26)


def pairs_of(rates: np.ndarray, per_host: int = 4) -> Pairs:
    count = len(rates)
    return Pairs(
        hosts=tuple(f"host{number // per_host}" for number in range(count)),
        devices=tuple(f"cuda:{number % per_host}" for number in range(count)),
        bytes_per_second=tuple(map(tuple, rates.tolist())),
        latency_seconds=tuple((1e-5,) * count for _ in range(count)),
    )


def grouped(count: int, size: int, near: float = 40e9, far: float = 10e9, noise: float = 0.02) -> np.ndarray:
    label = np.arange(count) // size
    rates = np.where(label[:, None] == label[None, :], near, far)
    rates = rates * (1 + noise * np.random.default_rng(count).standard_normal(rates.shape))
    np.fill_diagonal(rates, 0)
    return rates


def test_a_line_is_found_among_points_of_which_a_quarter_was_held_up() -> None:
    chance = np.random.default_rng(0)
    points = []
    for size in SIZES:
        for number in range(8):
            late = 0.05 * chance.random() if number % 4 == 0 else 0.0
            points.append((float(size), (1e-4 + size / 2e9) * (1 + 0.01 * chance.random()) + late))
    line = fit_line(points)
    assert line.bytes_per_second == pytest.approx(2e9, rel=0.03)
    assert line.latency_seconds == pytest.approx(1e-4, rel=0.1)
    assert 0 < line.rate_spread < 0.2
    assert line.seconds(2e9) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(
    ("collective", "factor"),
    [("all-reduce", 1.75), ("all-gather", 0.875), ("reduce-scatter", 0.875), ("all-to-all", 0.875),
     ("broadcast", 1.0), ("send-receive", 1.0)],
)  # fmt: skip
def test_bus_bandwidth_is_that_of_nccl_tests(collective: str, factor: float) -> None:
    assert bus_factor(collective, 8) == factor
    curve = Curve(collective=collective, scope="inside", num_devices=8, sizes=(8, 16), seconds=(1.0, 2.0))
    assert curve.algorithm_rates() == (8.0, 8.0)
    assert curve.bus_rates() == (8.0 * factor, 8.0 * factor)


@pytest.mark.parametrize(("count", "size"), [(16, 4), (16, 2), (12, 3), (8, 8), (64, 8)])
def test_neighbours_are_those_that_fast_links_join(count: int, size: int) -> None:
    expected = tuple(tuple(range(start, start + size)) for start in range(0, count, size))
    assert neighbours(pairs_of(grouped(count, size))) == expected
    # Whatever the numbers of devices are.
    order = np.random.default_rng(1).permutation(count)
    found = neighbours(pairs_of(grouped(count, size)[np.ix_(order, order)]))
    assert {frozenset(int(order[each]) for each in group) for group in found} == set(map(frozenset, expected))


def test_levels_are_found_one_in_the_other_and_pairs_know_theirs() -> None:
    rates = grouped(16, 4, near=100e9, far=10e9)
    pairs_in_four = np.arange(16) // 2
    rates[pairs_in_four[:, None] == pairs_in_four[None, :]] = 400e9
    np.fill_diagonal(rates, 0)
    found = levels(pairs_of(rates))
    assert [len(partition) for partition in found] == [8, 4, 1]
    assert kinds_of_links(pairs_of(rates))[0, [1, 2, 5]].tolist() == [0, 1, 2]


def test_a_link_that_is_ten_times_slower_is_named_and_parts_no_neighbours() -> None:
    for sender, receiver in ((1, 14), (4, 6)):
        rates = grouped(16, 4)
        rates[sender, receiver] /= 10
        pairs = pairs_of(rates)
        assert [(each.sender, each.receiver) for each in slow_links(pairs)] == [(sender, receiver)]
        assert slow_links(pairs)[0].usual / slow_links(pairs)[0].bytes_per_second == pytest.approx(10, rel=0.1)
        assert [len(group) for group in neighbours(pairs)] == [4, 4, 4, 4]
        assert not slow_in_links(pairs)
    assert not slow_links(pairs_of(grouped(16, 4)))


def test_a_device_whose_links_are_all_slow_is_named_as_a_device() -> None:
    rates = grouped(16, 8)
    rates[5] /= 3
    rates[:, 5] /= 3
    pairs = pairs_of(rates)
    assert [each.device for each in slow_in_links(pairs)] == [5]
    assert not slow_links(pairs)
    assert [each.device for each in slow_devices("matmuls", [7.0, 7.1, 3.0, 7.05])] == [2]
    assert not slow_devices("matmuls", [7.0, 7.1, 6.9, 7.05])


def figures(number: int, **changed: object) -> DeviceFigures:
    found = DeviceFigures(
        host=f"host{number // 4}", device=f"cuda:{number % 4}", kind="NVIDIA H200", memory_bytes=150 * 10**9,
        flops_per_second={"bf16": 790e12, "fp8": 1430e12, "fp32": 50e12}, copied=4.2e12, to_device=55e9, to_host=55e9,
        both_ways=48e9, disk_read=3e9, disk_write=2e9, num_cores=16, host_bytes=2**40, spread=0.01,
    )  # fmt: skip
    return replace(found, **changed)  # type: ignore[arg-type]


def curves(rate: float = 30e9) -> tuple[Curve, ...]:
    return tuple(
        Curve(
            collective=name, scope=scope, num_devices=4, sizes=SIZES,
            seconds=tuple(2e-5 + size * bus_factor(name, 4) / rate for size in SIZES),
        )
        for name in COLLECTIVES
        for scope in ("inside", "rails")
    )  # fmt: skip


def probe() -> Probe:
    devices = tuple(figures(number) for number in range(16))
    return Probe(backend="nccl", devices=devices, pairs=pairs_of(grouped(16, 4)), curves=curves())


def test_a_probe_becomes_a_cluster_that_its_file_gives_back() -> None:
    cluster = cluster_of(probe())
    (pool,) = cluster.pools
    assert str(cluster) == "4x4xh200"
    assert (pool.domain, pool.node.link.is_measured, pool.node.fabric.is_measured) == (4, True, True)
    assert pool.node.link.bytes_per_second == pytest.approx(40e9, rel=0.05)
    assert pool.node.fabric.bytes_per_second == pytest.approx(10e9, rel=0.05)
    assert pool.device.matmul_efficiency == pytest.approx(790 / 989)
    assert pool.device.fp8_efficiency == pytest.approx(1430 / 1979)
    assert from_toml(to_toml(cluster)) == cluster


def test_the_planner_prices_collectives_by_what_was_measured() -> None:
    on = Wires(pool=cluster_of(probe()).pools[0])
    seconds = on.all_reduce(np.array(SIZES), on.group(4, 1))
    assert seconds == pytest.approx([2e-5 + size * 1.5 / 30e9 for size in SIZES], rel=0.01)
    gathered = on.all_gather(np.array(SIZES), on.group(4, 1))
    assert gathered == pytest.approx([2e-5 + size * 0.75 / 30e9 for size in SIZES], rel=0.01)
    # Two of the four: a third of the steps, and the factor of two.
    half = on.all_reduce(np.array(SIZES), on.group(2, 1))
    assert half[-1] == pytest.approx(SIZES[-1] / 30e9, rel=0.02)


def test_a_device_that_is_slow_is_named_by_host_and_device() -> None:
    from shardwise.probing.words import findings

    devices = tuple(figures(number) for number in range(16))
    slow = replace(devices[6], flops_per_second={**devices[6].flops_per_second, "bf16": 400e12})
    rates = grouped(16, 4)
    rates[1, 14] /= 10
    found = replace(probe(), devices=(*devices[:6], slow, *devices[7:]), pairs=pairs_of(rates))
    assert findings(found) == [
        "neighbours, by number: 0 1 2 3, 4 5 6 7, 8 9 10 11 and 1 more",
        "slow link: host0 cuda:1 to host3 cuda:2 has 1.0 GB/s, 10 % of the 10.0 GB/s of others of its kind",
        "slow device: host1 cuda:2 has 51 % of what others have in bf16 matmuls",
    ]


def test_the_page_shows_every_pair_every_collective_and_what_stands_out() -> None:
    from shardwise.probing.page import make_probe_page

    rates = grouped(16, 4)
    rates[1, 14] /= 10
    page = make_probe_page(replace(probe(), pairs=pairs_of(rates)))
    assert page.count("<rect") == 2 * 16 * 15
    assert page.count('class="slow"') == 2
    assert page.count("<path") == 12
    assert "slow link: host0 cuda:1 to host3 cuda:2" in page
    assert "<script" not in page


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[pairs]\nhosts = []", "pairs.hosts in it is not of the 2 devices of 2xh100-80g: 0 are there"),
        ("[pairs]\nhost = []", "unknown key of pairs in it 'host'"),
        ("[[pool.curve]]\ncollective = 'all-reduced'", "unknown collective of a curve in it 'all-reduced'"),
        (
            "[[pool.curve]]\ncollective='all-reduce'\nscope='inside'\nsizes=[1, 2]\nseconds=[1.0]",
            "a curve in it has 2 sizes and 1 seconds",
        ),
        (
            "[[pool.curve]]\ncollective='all-reduce'\nscope='inside'\nsizes=[1, 2]\nseconds=[1.0, -1.0]",
            "seconds of a curve in it has -1.0: numbers above 0",
        ),
    ],
)
def test_a_file_that_was_changed_by_hand_and_wrong_gets_a_sentence(text: str, problem: str) -> None:
    whole = f'[[pool]]\ndevice = "h100"\ndevices_per_node = 2\n{text}\n'
    with pytest.raises(ShardwiseError) as error:
        from_toml(whole, source="it")
    assert problem in error.value.problem
    assert isinstance(from_toml('[[pool]]\ndevice = "h100"'), Cluster)
