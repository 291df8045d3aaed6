"""The RNG tracker: random numbers inside tensor-parallel regions.

Between a column layer and its row layer, ranks hold different channels and must draw different masks. Outside, all
ranks must draw the same ones. A rank that enters a region draws a seed, the same on all ranks, and mixes its rank into
it. On leaving it restores the shared generator. A forward recomputed from the same generator state draws the same.
A region in which nothing is drawn leaves no trace: the dropout of an engine does not use generators (`dropout.py`).
"""

from typing import NamedTuple

import torch

from shardwise.ranks.collectives import Group


class Channels(NamedTuple):
    """The positions of a rank's channels, and the channel count of the whole layer."""

    places: tuple[int, ...]
    whole: int


class RngTracker:
    """Switches between the generator that all ranks share and this rank's own in one region, which has `channels`.

    If nothing `draws` there, it only tells who is inside: a dropout of which a script raises the probability later.
    """

    def __init__(self, group: Group, channels: Channels | None = None, *, draws: bool = True) -> None:
        self._group, self.channels, self._draws = group, channels, draws
        #: Whether this rank is inside the region.
        self.is_inside = False
        #: The states before the region's seed was drawn, of this rank's own generator as it began, and after the seed.
        self._before = self._own = self._shared = torch.empty(0)

    def __deepcopy__(self, memo: dict[int, object]) -> "RngTracker":
        del memo
        return RngTracker(self._group, self.channels, draws=self._draws)

    def enter(self, device: torch.device) -> None:
        """Enter the region: from here on, this rank draws its own random numbers."""
        if self.is_inside or device.type == "meta":
            return
        self.is_inside = True
        if not self._draws:
            return
        self._before = _state(device)
        seed = int(torch.randint(2**62, (), device=device))
        self._shared = _state(device)
        own = (seed + 0x9E3779B97F4A7C15 * (self._group.rank + 1)) % 2**63
        if device.type == "cuda":
            torch.cuda.manual_seed(own)
        else:
            torch.default_generator.manual_seed(own)
        self._own = _state(device)

    def leave(self, device: torch.device) -> None:
        """Leave the region: restore the shared generator, so that all ranks draw the same again."""
        if not self.is_inside or device.type == "meta":
            return
        self.is_inside = False
        if not self._draws:
            return
        has_drawn = not torch.equal(_state(device), self._own)
        found = self._shared if has_drawn else self._before
        if device.type == "cuda":
            torch.cuda.set_rng_state(found, device)
        else:
            torch.set_rng_state(found)


def _state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
