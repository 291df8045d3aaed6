"""The end of a step: gradients made those of the whole batch's mean, looked at, clipped, and stepped with."""

import math

from shardwise.execution.interpreter import Tally
from shardwise.ranks.wires import Wires
from shardwise.states.data_parallel import DataParallel


class Update:
    """Steps. `gradient_norm` is that of the whole batch's gradient before it was clipped, if it was to be.

    A step whose loss or norm is not finite leaves the weights alone, and `was_finite` says so.
    """

    def __init__(self, data: DataParallel, wires: Wires, clip: float | None) -> None:
        self._data, self._wires, self._clip = data, wires, clip
        self.gradient_norm: float | None = None
        self.was_finite = True

    def finish(self, step: int) -> None:
        """Wait until the gradients of a step are summed over all that add to them."""
        self._data.finish(step)

    def take(self, tally: Tally) -> None:
        """Step with the gradients that were summed last."""
        self.was_finite = math.isfinite(tally.mean)  # A batch that has none says so here.
        scale = 1 / tally.count
        if self._clip is not None:
            square = self._data.square()
            self._wires.sum(square, "the norm of the gradients")
            self.gradient_norm = float(square) ** 0.5 * scale
            self.was_finite = self.was_finite and math.isfinite(self.gradient_norm)
            scale *= min(1.0, self._clip / (self.gradient_norm + 1e-6))
        if self.was_finite:
            self._data.step(scale)
