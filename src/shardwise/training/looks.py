"""When a training run looks at the streams of its GPUs: in its last step, and before that where it costs little.

To look slows a step by little; to begin to look, and to read what was seen, takes a moment beside it. What that takes
is counted apart, and is in no speed that is told.
"""

from time import perf_counter

from shardwise.execution.collector import StreamCollector
from shardwise.training.world import World

#: Of the time of a run, what may go into looks before the last step.
_MOST_SHARE = 0.005
#: What a look is taken to cost before there was one: the first starts CUPTI.
_FIRST_COST_SECONDS = 5.0


class StreamLooks:
    """Looks at the GPU of this rank. All ranks look in the same steps. `cost_seconds` is what all looks have taken."""

    def __init__(self, world: World) -> None:
        self._world, self._has_looked = world, False
        self._next_cost = _FIRST_COST_SECONDS
        self.cost_seconds = 0.0

    def begin(self, *, is_last: bool, elapsed: float) -> StreamCollector | None:
        """What looks at the step that comes now, if it is to be looked at. Every rank calls this alike."""
        if self._world.device.type != "cuda":
            return None
        is_dear = self.cost_seconds + self._next_cost > _MOST_SHARE * elapsed
        if not is_last and self._world.highest(float(is_dear)):
            return None
        start = perf_counter()
        if not self._has_looked:
            self._has_looked = True
            first = StreamCollector(self._world.device)
            first.start()
            first.stop()
            self.cost_seconds += perf_counter() - start
            start = perf_counter()
        collector = StreamCollector(self._world.device)
        collector.start()
        self.cost_seconds += perf_counter() - start
        self._next_cost = perf_counter() - start
        return collector

    def end(self, collector: StreamCollector | None) -> None:
        """The step was taken, and what was seen in it has been told to all."""
        if collector is not None:
            reading = perf_counter() - collector.ended
            self.cost_seconds += reading
            self._next_cost += reading
