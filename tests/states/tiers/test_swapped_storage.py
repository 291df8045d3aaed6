"""A tensor that lives on the host: its memory on the device goes only when no copy reads or writes it any more."""

import torch

from shardwise.states.tiers.swapped_storage import HostStorage
from tests.states.tiers.late import LateCopyStreams


class Lazy(LateCopyStreams):
    """Copies run only when somebody waits for them."""

    def run_some(self) -> None:
        """Nothing runs by itself."""

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._ways))


def test_memory_is_given_back_after_the_copy_into_it_though_nobody_has_used_it() -> None:
    copies, device = Lazy(0), torch.arange(4.0)
    storage = HostStorage(device, copies)
    storage.start()
    assert copies.num_waiting == 1
    storage.leave()
    assert (copies.num_waiting, device.untyped_storage().nbytes()) == (0, 0)


def test_what_was_written_is_on_the_host_before_the_memory_goes_and_comes_again() -> None:
    copies, device = Lazy(0), torch.arange(4.0)
    storage = HostStorage(device, copies)
    storage.follow()
    device += 1
    storage.write_back([slice(0, 4)])
    storage.leave()
    storage.follow()
    assert torch.equal(device, torch.arange(1.0, 5.0))
