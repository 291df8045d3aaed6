"""A tensor that lives on the host: its memory on the device goes only when no copy reads or writes it any more."""

import torch

from shardwise.states.tiers.swapped_storage import Guest
from tests.states.tiers.late import LateCrossing


class Lazy(LateCrossing):
    """Copies run only when somebody waits for them."""

    def run_some(self) -> None:
        """Nothing runs by itself."""

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._ways))


def test_memory_is_given_back_after_the_copy_into_it_though_nobody_has_used_it() -> None:
    crossing = Lazy(0)
    guest = Guest(torch.arange(4.0), crossing)
    guest.start()
    assert crossing.num_waiting == 1
    guest.leave()
    assert (crossing.num_waiting, guest.device_bytes) == (0, 0)


def test_what_was_written_is_at_home_before_the_memory_goes_and_comes_again() -> None:
    crossing = Lazy(0)
    guest = Guest(torch.arange(4.0), crossing)
    guest.follow()
    guest.here += 1
    guest.write_home([slice(0, 4)])
    guest.leave()
    guest.follow()
    assert torch.equal(guest.here, torch.arange(1.0, 5.0))
