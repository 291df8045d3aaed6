"""The RNG tracker: random numbers inside tensor-parallel regions.

Between a column layer and its row layer, ranks hold different channels and must draw different masks. Outside, all
ranks must draw the same ones. A rank that enters a region draws a seed, the same on all ranks, and mixes its rank into
it. On leaving it restores the shared generator. A forward recomputed from the same generator state draws the same.
"""

from typing import NamedTuple

import torch

from shardwise.ranks.collectives import Group


class Channels(NamedTuple):
    """The positions of a rank's channels, and the channel count of the whole layer."""

    places: tuple[int, ...]
    whole: int


class RngTracker:
    """Switches between the generator that all ranks share and this rank's own in one region, which has `channels`."""

    def __init__(self, group: Group, channels: Channels | None = None) -> None:
        self._group, self.channels = group, channels
        self._shared: torch.Tensor | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> "RngTracker":
        del memo
        return RngTracker(self._group, self.channels)

    @property
    def is_inside(self) -> bool:
        """Whether this rank is inside the region."""
        return self._shared is not None

    def enter(self, device: torch.device) -> None:
        """Enter the region: from here on, this rank draws its own random numbers."""
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
        """Leave the region: restore the shared generator, so that all ranks draw the same again."""
        if self._shared is None or device.type == "meta":
            return
        if device.type == "cuda":
            torch.cuda.set_rng_state(self._shared, device)
        else:
            torch.set_rng_state(self._shared)
        self._shared = None
