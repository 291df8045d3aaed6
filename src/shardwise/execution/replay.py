"""How layers are run again: as they were when their forward was run, inside of whatever computes now."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any

from torch import nn

from shardwise.execution.compute_policy import RngState
from shardwise.stages.activation_bytes import Kept
from shardwise.stages.rows import tensors_in
from shardwise.stages.split.module_stage import ModuleStage, Moment
from shardwise.stages.stage import Batch, Stage
from shardwise.torch_private import buffer_slots

#: Where modules keep buffers, and objects their attributes, that forwards write.
Written = Sequence[tuple[dict[str, Any], str]]


class Replay:
    """One forward of a stage whose layers are recomputed.

    `written` are buffers that forwards write, each a layer's own, and `left` attributes: a layer may reach those of any
    object. `select` has what depends on the microbatch (its weights, its rows) be as it was, and `keep` how often its
    dropouts were called. `note` is told when a layer has been run again, and since when. `kept` counts what is kept of
    what layers make.
    """

    def __init__(
        self,
        stage: ModuleStage,
        batch: Batch,
        *,
        written: Written,
        left: Written,
        select: Callable[[], None],
        keep: Callable[[], Callable[[], None]] | None,
        note: Callable[[float, float], None],
        kept: Kept | None,
    ) -> None:
        self._stage, self._batch, self._written, self._left = stage, batch, written, left
        self._select, self._keep, self._note, self._kept = select, keep, note, kept

    def take(self, layer: nn.Module) -> Moment:
        """Take down how it is now, for a layer."""
        owners = {id(buffer_slots(each)) for each in layer.modules()} if self._written else set()
        buffers = [each for each in self._written if id(each[0]) in owners]
        state = RngState.now(tensors_in(self._batch), [*buffers, *self._left])
        count_on = None if self._keep is None else self._keep()
        return lambda: self._again(layer, state, count_on), self._kept

    @contextmanager
    def _again(self, layer: nn.Module, state: RngState, count_on: Callable[[], None] | None) -> Iterator[None]:
        begun = perf_counter()
        self._select()
        if count_on is not None:
            count_on()
        with self._stage.running(self._batch), state.again(layer.buffers()):
            try:
                yield
            finally:  # It is broken off when all that is wanted of it is there.
                self._note(begun, perf_counter())


@contextmanager
def _in_use(stage: ModuleStage, replay: Replay) -> Iterator[None]:
    stage.moment = replay.take
    try:
        yield
    finally:
        stage.moment = None


def replayed(stage: Stage, batch: Batch, **how: Any) -> AbstractContextManager[Any]:
    """Around a forward whose layers are to be recomputed."""
    return _in_use(stage, Replay(stage, batch, **how)) if isinstance(stage, ModuleStage) else nullcontext()
