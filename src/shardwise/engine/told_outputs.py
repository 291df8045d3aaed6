"""Whether predictions of parts tell that of a batch, and how its numbers are joined: tried on a few rows."""

from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress

import torch

from shardwise.engine.loss_agreement import has_capacity
from shardwise.engine.parts import Parts
from shardwise.stages.batch import picked
from shardwise.stages.loss_kind import LossKind
from shardwise.stages.rows import Seen
from shardwise.stages.rows_apart import NUM_ROWS, Counting, DrawnError, Returned, Way, find_ways, rounding_of
from shardwise.stages.split.python_draws import draws_digest
from shardwise.stages.split.python_state import left_as_it_was
from shardwise.stages.split.seed import seeded_alike
from shardwise.stages.stage import Batch
from shardwise.stages.whole_step import generators

_REMEDY = (
    "a forward that treats each row by itself, and what compares rows computed from the whole output in the script; or"
    " a plan without dp and microbatches"
)
#: Computes a batch on all ranks, and returns the outputs of all its parts.
_Compute = Callable[[Batch, Counting | None], list[Returned]]


class ToldOutputs:
    """What a few rows have told of the predictions of an engine, by the names and words of a batch and what a script
    has set. All processes call it alike."""

    def __init__(self, parts: Parts) -> None:
        self._module, self._settings, self._wires = parts.module, parts.settings, parts.wires
        self._is_tried = parts.options.verify and not has_capacity(parts.module)
        # A number beside a loss is that of each part; tokens of a sequence are not tried.
        self._takes_all = parts.kind in (LossKind.BESIDE, LossKind.PAIR) or parts.plan.cp > 1
        self._counts = parts.plan.cp == 1
        self._rounding = rounding_of(parts.module, parts.plan.precision)
        self._ways: dict[Hashable, Mapping[int, Way]] = {}

    def ways_of(self, batch: Batch, seen: Seen, compute: _Compute, *, num_parts: int) -> Mapping[int, Way]:
        """Return how numbers of the output are joined; refuse an output that parts do not tell. Nothing is left of
        what is tried."""
        settings = 0 if self._settings is None else self._settings.bits
        words = [(name, each) for name, each in batch.items() if isinstance(each, (bool, int, str))]
        key = settings, *words, *batch
        number = min(NUM_ROWS, seen.length) // 2 * 2
        if key in self._ways or not self._is_tried or num_parts == 1 or not number:
            return self._ways.get(key, {})

        def rows(is_whole: bool, counting: Counting) -> list[Returned]:
            half = number // 2
            firsts = [0 if is_whole else half * (part % 2) for part in range(num_parts)]
            places = [first + row for first in firsts for row in range(number if is_whole else half)]
            before, drawn = generators(), draws_digest()
            made = compute(picked(batch, seen, places), counting if self._counts else None)
            has_drawn = drawn != draws_digest() or not all(map(torch.equal, before, generators()))
            if any([has_drawn] if self._wires.watch is None else self._wires.gather(has_drawn)):
                raise DrawnError
            return made[: 1 if is_whole else 2]

        self._ways[key] = {}
        with left_as_it_was(self._module), seeded_alike(), suppress(DrawnError):
            self._ways[key] = find_ways(rows, _REMEDY, rounding=self._rounding, takes_all=self._takes_all)
        return self._ways[key]
