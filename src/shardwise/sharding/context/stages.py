"""The stages of a pipeline whose tokens are shared out: each runs where attention sees those of other ranks."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwise.sharding.context.parallel import ContextParallel
from shardwise.stages.stage import Batch, Call, Split, Stage, Values, Wrappable


class ContextStage:
    """A stage that is run on microbatches which were cut for cp."""

    def __init__(self, stage: Stage, context: ContextParallel) -> None:
        self._stage, self._context = stage, context
        self.parameters: Mapping[str, nn.Parameter] = stage.parameters
        self.buffers: Mapping[str, torch.Tensor] = stage.buffers

    def run(self, values: Values, batch: Batch) -> tuple[Values, Any]:
        with self._context.running(batch):
            return self._stage.run(values, batch)

    @property
    def in_glue(self) -> Collection[str]:
        """The parameters that are used outside of units."""
        assert isinstance(self._stage, Wrappable), "stages of a module have units"
        return self._stage.in_glue

    def wrap(self, around: Callable[[str, Call], Call]) -> None:
        """Put something around the calls of its units: zero=3 gathers their weights one by one here too."""
        assert isinstance(self._stage, Wrappable), "stages of a module have units"
        self._stage.wrap(around)


def in_context(split: Split, context: ContextParallel) -> Split:
    """The same stages, each in its context."""
    stages = tuple(None if stage is None else ContextStage(stage, context) for stage in split.stages)
    return replace(split, stages=stages)
