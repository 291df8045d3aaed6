"""Recompute layers in the state of their original forward, in the middle of another computation."""

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

#: Slots (dictionary and key) of module buffers, or of object attributes, that forwards write to.
Written = Sequence[tuple[dict[str, Any], str]]


class Replay:
    """One forward of a stage whose layers are recomputed.

    `written` are buffers that forwards write to, each owned by one layer. `left` are attributes that forwards write to;
    a layer may reach those of any object. `select` restores the weights and rows of the microbatch, and `keep` the
    number of calls of its dropouts. `note` is called with start and end after a layer was recomputed. `kept` counts the
    bytes of layer results that are kept.
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
        """Take a snapshot of the current state for the recomputation of a layer."""
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
            finally:  # A recomputation stops as soon as it has made all that is needed.
                self._note(begun, perf_counter())


@contextmanager
def _in_use(stage: ModuleStage, replay: Replay) -> Iterator[None]:
    stage.moment = replay.take
    try:
        yield
    finally:
        stage.moment = None


def replayed(stage: Stage, batch: Batch, **how: Any) -> AbstractContextManager[Any]:
    """Return a context for a forward whose layers are to be recomputed."""
    return _in_use(stage, Replay(stage, batch, **how)) if isinstance(stage, ModuleStage) else nullcontext()
