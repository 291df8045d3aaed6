"""Whether the outputs of microbatches tell that of a batch, and how its numbers are joined: tried on a few rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.placing.batch_rows import few_rows
from shardwise.placing.rng_state import RngState
from shardwise.stages.rows_apart import NUM_ROWS, Counting, DrawnError, Returned, Way, find_ways
from shardwise.stages.split.python_state import left_as_it_was
from shardwise.stages.split.seed import seeded_alike
from shardwise.stages.stage import Batch
from shardwise.torch_private import RunningNormModule

_REMEDY = "microbatches=1; or compute from the output what rows are compared for, in the script"
#: Modules that are known to compute something else for each microbatch in training mode.
_BY_PARTS = (
    RunningNormModule, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip

#: Computes microbatches, counts their labels, and notes whether anything was drawn.
_Outputs = Callable[[Sequence[Batch], Counting, RngState], list[Returned]]


class ToldOutputs:
    """What a few rows have told of a module's outputs, by its modes and the arguments of a call."""

    def __init__(self, module: nn.Module, outputs: _Outputs) -> None:
        self._module, self._outputs = module, outputs
        self._ways: dict[tuple[Any, ...], Mapping[int, Way]] = {}

    def ways_of(self, batch: Batch, modes: tuple[Any, ...]) -> Mapping[int, Way]:
        """Return how numbers of the output are joined; refuse an output that microbatches do not tell.

        They are computed without dropout, and with the statistics that batch norms have. Nothing is left of it."""
        key = modes, tuple(batch)
        if key not in self._ways:
            self._ways[key] = self._find(batch)
        return self._ways[key]

    def _find(self, batch: Batch) -> Mapping[int, Way]:
        together, halves = few_rows(batch, NUM_ROWS)

        def compute(is_whole: bool, counting: Counting) -> list[Returned]:
            rng = RngState(trains=False)
            made = self._outputs([together] if is_whole else halves, counting, rng)
            if rng.have_drawn:
                raise DrawnError
            return made

        training = [each for each in self._module.modules() if each.training]
        # Functions may drop too: then evaluation mode tells what it can.
        for still in ([each for each in training if isinstance(each, _BY_PARTS)], training):
            with left_as_it_was(self._module), seeded_alike(), torch.no_grad(), _evaluated(still):
                try:
                    return find_ways(compute, _REMEDY)
                except DrawnError:  # Each microbatch draws its own.
                    continue
        return {}


@contextmanager
def _evaluated(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let modules be in evaluation mode within the context."""
    for each in modules:
        each.training = False
    try:
        yield
    finally:
        for each in modules:
            each.training = True
