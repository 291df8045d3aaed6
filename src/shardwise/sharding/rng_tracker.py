"""The RNG tracker: random numbers inside of tensor-parallel regions.

Between a column and its row each rank has other channels, so each must draw other masks. Outside, all ranks must draw
the same ones. So a rank that enters a region draws a seed, as all do, and mixes its own rank into it. When it leaves,
it sets the shared generator back. A forward that is recomputed from the same generator draws the same again.
"""

from typing import NamedTuple

import torch

from shardwise.ranks.collectives import Group


class Channels(NamedTuple):
    """Which channels of a whole layer's a rank has."""

    places: tuple[int, ...]
    whole: int


class RngTracker:
    """The generators of one region: the one that all ranks share, and this rank's own. `channels` are those in it."""

    def __init__(self, group: Group, channels: Channels | None = None) -> None:
        self._group, self.channels = group, channels
        self._shared: torch.Tensor | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> "RngTracker":
        del memo
        return RngTracker(self._group, self.channels)

    @property
    def is_inside(self) -> bool:
        """Whether the rank is inside."""
        return self._shared is not None

    def enter(self, device: torch.device) -> None:
        """Enter: from here on, this rank draws its own."""
        if self._shared is not None or device.type == "meta":
            return
        on_gpu = device.type == "cuda"
        seed = int(torch.randint(2**62, (), device=device))
        self._shared = torch.cuda.get_rng_state(device) if on_gpu else torch.get_rng_state()
        own = (seed + 0x9E3779B97F4A7C15 * (self._group.rank + 1)) % 2**63
        if on_gpu:
            torch.cuda.manual_seed(own)
        else:
            torch.default_generator.manual_seed(own)

    def leave(self, device: torch.device) -> None:
        """Leave: all draw the same again."""
        if self._shared is None or device.type == "meta":
            return
        if device.type == "cuda":
            torch.cuda.set_rng_state(self._shared, device)
        else:
            torch.set_rng_state(self._shared)
        self._shared = None
