"""What the doctor asks of whoever can play a step again with something changed (`schedule/replay.py`)."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol


class Alternative(NamedTuple):
    """Another schedule: what to put in the plan, how long the step would be, and the most that a rank would hold."""

    plan: str
    seconds: float
    held: float


class Player(Protocol):
    """Plays the step of a trace. Times are seconds of the whole step."""

    @property
    def seconds(self) -> float:
        """The step as it was, played."""
        ...

    @property
    def usual_seconds(self) -> float:
        """The step with every instruction as long as it usually is: what all changes but one are compared with."""
        ...

    @property
    def stage_seconds(self) -> Sequence[float]:
        """What a microbatch takes on each stage, forward and backward together."""
        ...

    @property
    def held(self) -> float:
        """The most microbatches of a stage that a rank holds."""
        ...

    def with_stages(self, factors: Mapping[int, float]) -> float:
        """With some stages taking so many times as long."""
        ...

    def with_even_instructions(self, ranks: Sequence[int]) -> float:
        """With every instruction of some ranks as quick as it usually is; to be compared with `seconds`."""
        ...

    def with_hops(self, factor: float) -> float:
        """With transfers between ranks taking so many times as long."""
        ...

    def with_backward(self, factors: Mapping[int, float]) -> float:
        """With the backwards of some ranks taking so many times as long."""
        ...

    def with_microbatches(self, factor: int) -> float | None:
        """With so many times as many microbatches, each as much smaller. None if the schedule is not made for that."""
        ...

    def alternatives(self) -> Sequence[Alternative]:
        """Other schedules for the same ranks, stages and microbatches, the quickest first."""
        ...
