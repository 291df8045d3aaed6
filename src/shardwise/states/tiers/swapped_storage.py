"""Numbers that live on the host and are guests on the device.

There they have one storage, which is empty while they are away. So whatever looks into it, such as a parameter, or what
autograd has saved of one in a forward, has its numbers again when they have come again for the backward.
"""

from collections.abc import Sequence

from torch import Tensor

from shardwise.dataflow.streams import Event
from shardwise.states.tiers.copy_streams import Crossing


class Guest:
    """A tensor of the device that moves to the host, its storage being its own; it comes when it is told to."""

    def __init__(self, here: Tensor, crossing: Crossing) -> None:
        self.here, self._crossing = here, crossing
        self.home = crossing.pinned(here.shape, here.dtype)
        self.home.copy_(here)
        self._renewed: list[Event] = []
        self._is_here = False
        self._arrives: Event | None = None
        #: When what was written on the device is at home too.
        self._written: list[Event] = []
        here.untyped_storage().resize_(0)

    @property
    def device_bytes(self) -> int:
        """What it takes on the device now."""
        return self.here.untyped_storage().nbytes()

    def take_room(self) -> None:
        """Have memory here, for numbers that come from elsewhere."""
        if not self._is_here:
            self._is_here = True
            self.here.untyped_storage().resize_(self.home.nbytes)

    def start(self, part: slice | None = None) -> None:
        """Have it come, if it is not here or on its way; or have memory for all of it, and a part of it come."""
        if not self._is_here:
            self.take_room()
            # The memory was somebody else's until all that is computed by now is.
            after = [*self._renewed, *self._crossing.computed()]
            here, home = (self.here, self.home) if part is None else (self.here[part], self.home[part])
            self._arrives, self._renewed = self._crossing.inward(here, home, after), []

    def follow(self) -> None:
        """Have it here, for what is computed next."""
        self.start()
        if self._arrives is not None:
            self._crossing.follow(self._arrives)

    def write_home(self, parts: Sequence[slice]) -> None:
        """What was computed here of some parts is what they are from now on."""
        there = [part for part in parts if part.start < part.stop]
        self._written += [self._crossing.outward(self.home[part], self.here[part], self._renewed) for part in there]

    def leave(self) -> None:
        """Nobody needs it."""
        if self._is_here:
            self.follow()
            for mark in self._written:
                self._crossing.follow(mark)
            self._renewed += self._written
            self.here.untyped_storage().resize_(0)
            self._is_here, self._arrives, self._written = False, None, []

    def is_renewed(self, marks: Sequence[Event]) -> None:
        """The numbers at home are new once these marks are reached; what is here is old."""
        self.leave()
        self._renewed += marks

    def wait(self) -> None:
        """Have what is at home be the newest."""
        for mark in [*self._renewed, *self._written]:
            mark.wait()
        self._renewed.clear()
