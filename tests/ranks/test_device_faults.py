"""Devices that wait for a rank that does not come: it is named, and a host that does not come back is ended."""

from pathlib import Path

import pytest

from shardwise.ranks.rank_error import RankError
from shardwise.ranks.spawn import Ranks
from tests.ranks import stuck_devices

LIMIT_SECONDS = 1.0


def test_a_rank_whose_device_waits_names_the_one_that_does_not_come(two: Ranks, tmp_path: Path) -> None:
    told, _ = two.run(stuck_devices.wait_for_the_device, LIMIT_SECONDS, True, tmp_path)
    assert told.startswith("rank 1 has been at a place of its own for ")
    assert "\n  rank 0 waits on its GPU at F2 (" in told


def test_a_host_that_waits_for_its_device_in_code_of_the_module_names_the_one_that_does_not_come(
    two: Ranks, tmp_path: Path
) -> None:
    told, _ = two.run(stuck_devices.wait_for_the_device, LIMIT_SECONDS, True, tmp_path, False)
    assert told.startswith("rank 1 has been at a place of its own for ")
    assert "\n  rank 0 waits on its GPU at F2 (" in told


def test_a_host_that_is_held_up_by_what_it_asks_its_device_for_waits_for_the_other_rank(
    two: Ranks, tmp_path: Path
) -> None:
    told, _ = two.run(stuck_devices.ask_for_a_message, LIMIT_SECONDS, tmp_path)
    assert told.startswith("rank 1 has been at a place of its own for ")
    assert "\n  rank 0 waits for rank 1 at 1RECV_F2<0 (" in told


@pytest.mark.xdist_group("pairs")
def test_a_process_whose_host_does_not_come_back_is_ended_and_says_why(tmp_path: Path) -> None:
    with Ranks(2) as ranks, pytest.raises(RankError) as caught:
        ranks.run(stuck_devices.wait_for_the_device, LIMIT_SECONDS, False, tmp_path, timeout_seconds=60)
    assert caught.value.rank == 1
    assert caught.value.problem.startswith("rank 1 has been at a place of its own for ")
