"""Ranks that share a GPU are all told apart for NCCL, whoever has started them; those that do not are left alone."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardwise import environment
from shardwise.ranks.shared_gpus import Seat, share_if_needed
from shardwise.ranks.store_meeting import StoreMeeting
from shardwise.torch_private import TCPStore

HERE = Seat(gpu="GPU-1", network="machine 1")


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    before = environment.all_variables()
    yield
    environment.replace_all(before)


def settings(seats: list[Seat]) -> list[dict[str, str]]:
    """What is set for NCCL in the process of each rank, where each has an agent of its own, and so is local rank 0."""
    found, plain = [], {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
    for rank, seat in enumerate(seats):
        torchrun = {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": str(len(seats))}
        environment.replace_all({**plain, **torchrun})
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with ThreadPoolExecutor(len(seats)) as pool:  # The others, whose processes have environments of their own.
            for other, its_seat in enumerate(seats):
                if other != rank:
                    meeting = StoreMeeting(store, "shardwise/seats", other, len(seats))
                    pool.submit(meeting.exchange, its_seat, lambda: None)
            share_if_needed(store, environment.rank_under_torchrun(), len(seats), seat)
        found.append({name: value for name, value in os.environ.items() if name.startswith("NCCL_")})
    return found


def test_two_agents_on_one_machine_with_a_rank_each_on_the_same_gpu() -> None:
    first, second = settings([HERE, HERE])
    assert first["NCCL_HOSTID"] != second["NCCL_HOSTID"]
    assert first["NCCL_SOCKET_IFNAME"] == second["NCCL_SOCKET_IFNAME"] == "lo"


def test_ranks_of_another_machine_are_not_looked_for_on_the_loopback() -> None:
    # Only the first two share one. The third has to talk as they do.
    found = settings([HERE, HERE, Seat(gpu="GPU-2", network="machine 2")])
    assert len({each["NCCL_HOSTID"] for each in found}) == 3
    assert not any("NCCL_SOCKET_IFNAME" in each for each in found)
    assert all(each["NCCL_IB_DISABLE"] == "1" for each in found)


@pytest.mark.parametrize("gpus", [["GPU-1", "GPU-2"], ["", ""]], ids=["one each", "none"])
def test_nothing_is_set_where_nobody_shares_a_gpu(gpus: list[str]) -> None:
    assert settings([Seat(gpu=gpu, network="machine 1") for gpu in gpus]) == [{}, {}]
