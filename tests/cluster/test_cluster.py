"""Clusters by name, as values and as files."""

from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.cluster.catalogue import DEVICES, NODES, get_device
from shardwise.cluster.cluster import Cluster, make_pool
from shardwise.cluster.file import find_cluster, from_toml, load, to_toml
from shardwise.errors import ShardwiseError


@pytest.mark.parametrize(
    ("name", "num_devices", "devices", "text"),
    [
        ("8xh100", 8, ["h100-80g"], "8xh100-80g"),
        ("64x8xh100", 512, ["h100-80g"], "64x8xh100-80g"),
        ("4x8xa100-40g", 32, ["a100-40g"], "4x8xa100-40g"),
        ("1xh200", 1, ["h200"], "1xh200"),
        ("1x8xH100", 8, ["h100-80g"], "8xh100-80g"),
        ("2x8xh100+4x8xa100-80g", 48, ["h100-80g", "a100-80g"], "2x8xh100-80g+4x8xa100-80g"),
        ("2xcpu", 2, ["cpu"], "2xcpu"),
        ("8x4090", 8, ["rtx4090"], "8xrtx4090"),
        ("64xh100", 64, ["h100-80g"], "8x8xh100-80g"),  # No node has 64 of them.
        ("72xgb200", 72, ["gb200"], "18x4xgb200"),
        ("1x16xh100", 16, ["h100-80g"], "1x16xh100-80g"),  # If it is said.
    ],
)
def test_a_name_says_nodes_devices_and_kind(name: str, num_devices: int, devices: list[str], text: str) -> None:
    cluster = Cluster.parse(name)
    assert cluster.num_devices == num_devices
    assert [pool.device.name for pool in cluster.pools] == devices
    assert str(cluster) == text
    assert Cluster.parse(text) == cluster


def test_a_rack_is_one_domain_however_few_devices_share_a_host() -> None:
    rack = Cluster.parse("18x4xgb200").pools[0]
    assert (rack.node.devices_per_node, rack.domain) == (4, 72)
    assert Cluster.parse("2x4xgb200").pools[0].domain == 8  # No larger than what is there.
    assert Cluster.parse("64x4xgb200").pools[0].domain == 72


def test_a_smaller_node_is_a_smaller_domain() -> None:
    assert Cluster.parse("2x4xh100").pools[0].domain == 4


def test_ranks_number_pools_in_order() -> None:
    cluster = Cluster.parse("1x2xh100+1x2xa100-80g")
    assert [cluster.pool_of(rank).device.name for rank in range(4)] == ["h100-80g"] * 2 + ["a100-80g"] * 2
    with pytest.raises(ShardwiseError, match="has 4 devices"):
        cluster.pool_of(4)


@pytest.mark.parametrize(
    ("name", "problem", "remedy"),
    [
        ("8xh1000", "unknown device 'h1000'", "h100"),
        ("8xa100-80", "unknown device 'a100-80'", "a100-80g"),
        ("h100", "not understood at 'h100'", "8xh100"),
        ("8xh100+", "not understood at ''", "8xh100"),
        ("0xh100", "0 devices", "8xh100"),
        ("12xh100", "12xh100 is not a whole number of nodes", "2x6xh100"),
        ("8xfrobnicator", "unknown device 'frobnicator'", "cluster.toml"),
    ],
)
def test_a_wrong_name_is_answered_with_a_right_one(name: str, problem: str, remedy: str) -> None:
    with pytest.raises(ShardwiseError) as caught:
        Cluster.parse(name)
    assert problem in caught.value.problem
    assert caught.value.remedy is not None
    assert remedy in caught.value.remedy


def test_every_device_has_a_node_and_every_node_a_device() -> None:
    assert set(DEVICES) == set(NODES)


def test_a_precision_that_a_device_lacks_runs_as_the_next_wider_one() -> None:
    a100 = get_device("a100-80g")
    assert a100.peak("fp8") == a100.peak("bf16") == 312e12
    assert get_device("v100-32g").peak("bf16") == 125e12
    assert get_device("cpu").peak("bf16") == get_device("cpu").peak("fp32")
    with pytest.raises(ShardwiseError, match="unknown precision 'bf61'"):
        a100.peak("bf61")


@pytest.mark.parametrize("name", ["8xh100", "18x4xgb200", "2x8xh100+4x8xa100-80g", "2xcpu"])
def test_the_file_form_reads_back(name: str, tmp_path: Path) -> None:
    cluster = Cluster.parse(name)
    path = tmp_path / "cluster.toml"
    path.write_text(to_toml(cluster))
    assert load(path) == cluster
    assert find_cluster(str(path)) == cluster


def test_a_file_says_only_what_differs() -> None:
    slow = from_toml('[[pool]]\ndevice = "a100"\nnum_nodes = 2\n[pool.fabric]\nbytes_per_second = 6.25e9\n')
    usual = make_pool("a100-80g", num_nodes=2)
    assert slow.pools[0].node.fabric == replace(usual.node.fabric, bytes_per_second=6.25e9)
    assert slow.pools[0].node.link == usual.node.link


def test_a_file_can_describe_a_device_without_a_name() -> None:
    text = """
[[pool]]
device = "mine"
devices_per_node = 2
[pool.device_is]
memory_bytes = 1000
flops_per_second = { bf16 = 1e12 }
memory_bytes_per_second = 1e11
num_units = 10
"""
    pool = from_toml(text).pools[0]
    assert (pool.device.name, pool.device.peak("bf16"), pool.num_devices) == ("mine", 1e12, 2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("pool = 3", "names no pool"),
        ("", "names no pool"),
        ("[[pool", "is not valid TOML"),
        ('[[pools]]\ndevice = "h100"', "unknown key in the cluster file 'pools'"),
        ("[[pool]]\nnum_nodes = 2", "names no device"),
        ('[[pool]]\ndevice = "h100"\nnodes = 2', "unknown key of a pool in the cluster file 'nodes'"),
        ('[[pool]]\ndevice = "h100"\nnum_nodes = 0', "num_nodes = 0"),
        ('[[pool]]\ndevice = "h100"\n[pool.link]\nspeed = 2', "unknown key of link in the cluster file 'speed'"),
        ('[[pool]]\ndevice = "h100"\n[pool.link]\nbytes_per_second = "2"', "wants a float"),
        ('[[pool]]\ndevice = "h100"\nlink = 2', "link = 2 in the cluster file is not a table"),
        ('[[pool]]\ndevice = "mine"\n[pool.device_is]\nmemory_bytes = 3', "says no flops_per_second"),
        ('[[pool]]\ndevice = "h100"\n[pool.device_is]\nflops_per_second = { bf61 = 3.0 }', "'bf61'"),
    ],
)
def test_a_wrong_file_is_told_what_is_wrong(text: str, problem: str) -> None:
    with pytest.raises(ShardwiseError) as caught:
        from_toml(text)
    assert problem in caught.value.problem


def test_a_file_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ShardwiseError, match="cannot be read"):
        load(tmp_path / "no.toml")
