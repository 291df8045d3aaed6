"""When a training run profiles the streams of its GPUs: in its last step, and in earlier ones if that costs little.

Profiling slows a step only slightly. Starting the profiler and reading its results take additional time, which is
counted separately and excluded from reported speeds.
"""

from time import perf_counter

from shardwise.execution.collector import StreamCollector
from shardwise.training.world import World

#: The share of a run's time that profiling may cost before the last step.
_MOST_SHARE = 0.005
#: The assumed cost of the first profile, which starts CUPTI.
_FIRST_COST_SECONDS = 5.0


class StreamLooks:
    """Profiles the GPU of this rank. All ranks profile the same steps. `cost_seconds` is the total cost so far."""

    def __init__(self, world: World) -> None:
        self._world, self._has_looked = world, False
        self._next_cost = _FIRST_COST_SECONDS
        self.cost_seconds = 0.0

    def begin(self, *, is_last: bool, elapsed: float) -> StreamCollector | None:
        """Return a started collector if the next step is to be profiled, else None. Every rank calls this."""
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
        """Record the cost of reading, after the step is done and its profile has been shared with all ranks."""
        if collector is not None:
            reading = perf_counter() - collector.ended
            self.cost_seconds += reading
            self._next_cost += reading
