"""When the weights of a rank's stages come, and who waits for them: each unit for its own, the stage for the rest."""

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from shardwise.schedule.instruction import Instruction, Kind
from shardwise.stages.split.module_stage import ModuleStage
from shardwise.stages.stage import Stage
from shardwise.states.buckets.bucket import Bucket
from shardwise.states.buckets.make import ZeroConfig
from shardwise.states.buckets.offloaded_weights import OffloadedWhole
from shardwise.states.buckets.weights import Weights
from shardwise.states.unit_prefetch import UnitPrefetch

_HALVES_OF_BACKWARD = (Kind.I, Kind.W)
_MAKES_GRADIENTS = (Kind.B, Kind.W)


def make_unit_prefetch(
    stages: Mapping[int, Stage], sharing: ZeroConfig, module: nn.Module | None
) -> dict[int, UnitPrefetch]:
    """By stage, where weights come unit by unit, may live on the host, or are updated under the next forward."""
    comes = sharing.zero > 0 and (sharing.zero < 3 or sharing.layerwise)
    if module is None or not (comes or sharing.offloaded or sharing.updates_late):
        return {}
    return {number: UnitPrefetch(stage) for number, stage in stages.items() if isinstance(stage, ModuleStage)}


class StageWeights:
    """The buckets of each stage. `users` are the units that use a parameter, by its id, where nothing else does."""

    def __init__(
        self,
        stages: Iterable[int],
        units: Mapping[int, UnitPrefetch],
        buckets: Sequence[Bucket],
        users: Mapping[int, Sequence[str]],
    ) -> None:
        self._units = units
        self._buckets = {number: [each for each in buckets if number in each.home.stages] for number in stages}
        #: What is not waited for by a unit is waited for by its stage.
        self._loose = {
            number: [each for each in mine if number not in units or not _units_of(each, users)]
            for number, mine in self._buckets.items()
        }
        for number, mine in units.items():
            mine.attach(_by_unit(mine, self._buckets[number], users))
        self._has_offloaded = any(bucket.is_offloaded for bucket in buckets)

    def gather(self, stage: int) -> None:
        """A stage's weights begin to come in."""
        for bucket in self._buckets[stage]:
            bucket.weights.claim(stage)

    def release(self, stage: int) -> None:
        """And go again."""
        for bucket in self._buckets[stage]:
            bucket.weights.let_go(stage)

    def begin(self, instruction: Instruction) -> None:
        """Something is about to be computed on a stage."""
        for bucket in self._loose[instruction.stage]:
            bucket.weights.wait()
        if instruction.kind in _MAKES_GRADIENTS:
            for bucket in self._buckets[instruction.stage]:
                # The last update may still read the memory that gradients are written to, of a unit that was not run.
                if bucket.is_renewed_late:
                    bucket.weights.wait()
        if self._has_offloaded and instruction.kind in _HALVES_OF_BACKWARD and instruction.stage in self._units:
            # A half of a backward goes through units in an order of its own.
            self._units[instruction.stage].enter_all()

    def end(self, stage: int) -> None:
        """It has been computed."""
        if stage in self._units:
            self._units[stage].leave_all()
            for bucket in self._loose[stage]:
                bucket.weights.let_go(stage)


def _units_of(bucket: Bucket, users: Mapping[int, Sequence[str]]) -> set[str]:
    """The units that a bucket comes for, or that wait for it; none if it comes for its stage."""
    every = [users.get(id(each), ()) for each in bucket.weights.parameters]
    # What several units use is gathered once for their stage. It comes from the host, or is waited for, for each.
    can_come = isinstance(bucket.weights, OffloadedWhole) or bucket.is_renewed_late
    if all(len(each) == 1 or (each and can_come) for each in every):
        return {unit for each in every for unit in each}
    return set()


def _by_unit(
    prefetch: UnitPrefetch, buckets: Sequence[Bucket], users: Mapping[int, Sequence[str]]
) -> dict[str, list[Weights]]:
    """The weights of the buckets that come for each unit, or that it waits for."""
    found: dict[str, list[Weights]] = {unit: [] for unit in prefetch.units}
    for bucket in buckets:
        for unit in _units_of(bucket, users) & found.keys():
            found[unit].append(bucket.weights)
    return found
