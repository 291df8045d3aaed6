"""Storages that come and go: the states of the table, with copies that happen as late as they may."""

import pytest
import torch

from shardwise.dataflow.streams import Event
from shardwise.states.tiers.swapped_storage import HostStorage, SourcedStorage, Swap
from tests.states.tiers.late import LateCopyStreams


@pytest.mark.parametrize("seed", range(5))
def test_a_storage_walks_through_the_states_of_the_table(seed: int) -> None:
    copies, device = LateCopyStreams(seed), torch.arange(6.0)
    storage = HostStorage(device, copies)
    assert storage.state is Swap.AWAY
    assert device.untyped_storage().nbytes() == 0
    storage.start()
    assert storage.state is Swap.COMING
    storage.follow()
    assert storage.state is Swap.HERE
    assert device.tolist() == [0, 1, 2, 3, 4, 5]
    storage.leave()
    assert storage.state is Swap.AWAY
    assert device.untyped_storage().nbytes() == 0
    storage.reserve()
    assert storage.state is Swap.HERE, "whoever reserves memory writes it"
    storage.leave()
    storage.leave()
    assert storage.state is Swap.AWAY


@pytest.mark.parametrize("seed", range(5))
def test_what_is_written_on_the_device_is_there_when_it_comes_again(seed: int) -> None:
    copies, device = LateCopyStreams(seed), torch.zeros(6)
    storage = HostStorage(device, copies)
    for number in range(1, 4):
        storage.start_part(slice(2, 4))
        storage.follow()
        device[2:4] += number
        storage.write_back([slice(2, 4), slice(4, 4)])
        storage.leave()
    storage.wait()
    assert storage.host.tolist() == [0, 0, 6, 6, 0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_numbers_that_are_renewed_on_the_host_come_after_they_are_there(seed: int) -> None:
    copies, device = LateCopyStreams(seed), torch.zeros(4)
    storage, newer = HostStorage(device, copies), torch.ones(4)
    storage.follow()
    storage.is_renewed([copies.to_host_after(storage.host, newer)])
    assert storage.state is Swap.AWAY, "what is here is old"
    storage.follow()
    assert device.tolist() == [1, 1, 1, 1]


def test_one_whose_source_fails_is_still_away() -> None:
    def fail(_: object) -> Event:
        raise ValueError("no such luck")

    storage = SourcedStorage(torch.zeros(3), LateCopyStreams(0), fail)
    with pytest.raises(ValueError, match="no such luck"):
        storage.start()
    assert storage.state is Swap.AWAY
