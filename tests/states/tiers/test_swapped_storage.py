"""Storages that come and go: the states of the table, with copies that happen as late as they may."""

import pytest
import torch

from shardwise.dataflow.deferred_free import DeferredFree
from shardwise.dataflow.streams import Event
from shardwise.states.tiers.swapped_storage import HostStorage, Presence, SourcedStorage
from tests.states.tiers.late import LateCopyStreams


@pytest.mark.parametrize("seed", range(5))
def test_a_storage_walks_through_the_states_of_the_table(seed: int) -> None:
    copies, device = LateCopyStreams(seed), torch.arange(6.0)
    storage = HostStorage(device, copies, DeferredFree(0))
    seen: list[tuple[Presence, bool]] = []
    # Whoever reserves memory writes it, so it is here; one that leaves twice is away all the same.
    for call in (None, storage.start, storage.follow, storage.leave, storage.reserve, storage.leave, storage.leave):
        if call is not None:
            call()
        if call == storage.follow:
            assert device.tolist() == [0, 1, 2, 3, 4, 5]
        seen.append((storage.state, device.untyped_storage().nbytes() > 0))
    away, coming, here = (Presence.AWAY, False), (Presence.COMING, True), (Presence.HERE, True)
    assert seen == [away, coming, here, away, here, away, away]


@pytest.mark.parametrize("seed", range(5))
def test_what_is_written_on_the_device_is_there_when_it_comes_again(seed: int) -> None:
    copies, device = LateCopyStreams(seed), torch.zeros(6)
    storage = HostStorage(device, copies, DeferredFree(0))
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
    storage, newer = HostStorage(device, copies, DeferredFree(0)), torch.ones(4)
    storage.follow()
    storage.is_renewed([copies.to_host_after(storage.host, newer)])
    assert storage.state is Presence.AWAY, "what is here is old"
    storage.follow()
    assert device.tolist() == [1, 1, 1, 1]


def test_one_whose_source_fails_is_still_away() -> None:
    def fail(_: object) -> Event:
        raise ValueError("no such luck")

    storage = SourcedStorage(torch.zeros(3), LateCopyStreams(0), fail)
    with pytest.raises(ValueError, match="no such luck"):
        storage.start()
    assert storage.state is Presence.AWAY


class LazyCopyStreams(LateCopyStreams):
    """Copies run only when somebody waits for them."""

    def run_some(self) -> None:
        """Nothing runs by itself."""

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._ways))


def test_memory_is_freed_after_the_copy_into_it_though_nobody_has_used_it() -> None:
    copies, device = LazyCopyStreams(0), torch.arange(4.0)
    storage = HostStorage(device, copies, DeferredFree(0))
    storage.start()
    assert copies.num_waiting == 1
    storage.leave()
    assert (copies.num_waiting, device.untyped_storage().nbytes()) == (0, 0)


def test_what_was_written_is_on_the_host_before_the_memory_goes_and_comes_again() -> None:
    copies, device = LazyCopyStreams(0), torch.arange(4.0)
    storage = HostStorage(device, copies, DeferredFree(0))
    storage.follow()
    device += 1
    storage.write_back([slice(0, 4)])
    storage.leave()
    storage.follow()
    assert torch.equal(device, torch.arange(1.0, 5.0))
