"""The cost of an instruction: seconds on its rank, seconds of a hop, and the memory that the rank holds meanwhile.

The simulator takes prices as functions, so unit prices, the planner's predictions and measured times share one code
path. The prices made here know nothing about a model: they divide the times of a rank's whole stage.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.errors import ShardwiseError
from shardwise.schedule.instruction import Instruction, Kind
from shardwise.schedule.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of a schedule's instructions.

    `seconds(instruction, rank)` is the time of any instruction except sends and receives. `hop_seconds(send, source,
    target)` is for a send between two ranks: the time until arrival, and the part of it during which the link is
    occupied (0 if all is latency). Compute takes `1 + slowdown` times as long while bytes move to or from its rank.
    `held(instruction)` is the change of held memory at the instruction's start and at its end.
    """

    seconds: Callable[[Instruction, int], float]
    hop_seconds: Callable[[Instruction, int, int], tuple[float, float]]
    held: Callable[[Instruction], tuple[float, float]]
    slowdown: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one microbatch on a rank's whole stage: forward, input gradient, weight gradient, overlapped pair.

    `pair` is the time of a forward overlapped with a full backward; without one they run one after the other.
    """

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    pair: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("F", self.forward), ("I", self.input_gradient), ("W", self.weight_gradient)):
            if not 0 <= value < float("inf"):
                raise ShardwiseError(
                    f"the time of {name} is {value}, but a time must be 0 or more", remedy="--times 1,1,1"
                )
        if self.total <= 0:
            raise ShardwiseError("the times of F, I and W are all 0: nothing to schedule", remedy="--times 1,1,1")
        low, high = max(self.forward, self.backward), self.total
        if self.pair is not None and not low <= self.pair <= high:
            raise ShardwiseError(
                f"an overlapped pair of {self.pair:g} is not between its longer half, {low:g}, and both together, "
                f"{high:g}",
                remedy=f"--pair {low:g}",
            )

    @property
    def backward(self) -> float:
        return self.input_gradient + self.weight_gradient

    @property
    def total(self) -> float:
        return self.forward + self.backward

    @property
    def by_kind(self) -> dict[Kind, float]:
        """Seconds of each kind of instruction on a whole stage: 0 for kinds that do not compute."""
        computed = {Kind.F: self.forward, Kind.B: self.backward, Kind.I: self.input_gradient}
        return {**dict.fromkeys(Kind, 0.0), **computed, Kind.W: self.weight_gradient}


def stage_prices(
    placement: Placement,
    times: Sequence[StageTimes],
    *,
    hops: Sequence[float] = (),
    kept_for_weights: float = 1.0,
    slowdown: float = 0.0,
) -> Prices:
    """Return prices with given times for each rank (or each stage), and a hop for each boundary between ranks.

    `times` has an entry for each rank, divided evenly over its chunks, or one for each stage. `hops[r]` is the seconds
    between ranks r and r + 1 (a single entry serves all boundaries). A transfer over several boundaries takes as long
    as the slowest. `kept_for_weights` is the fraction of an activation that is still held between I and W.
    """
    of_stage = times if len(times) == placement.num_stages else [times[rank] for rank in placement.ranks]
    scale = 1.0 if len(times) == placement.num_stages != placement.num_ranks else placement.share
    cost = {(kind, stage): scale * taken for stage, each in enumerate(of_stage) for kind, taken in each.by_kind.items()}

    def seconds(instruction: Instruction, rank: int) -> float:  # noqa: ARG001 - a stage has one rank
        kind, stage, _, _, back = instruction
        if back is None:
            return cost[kind, stage]
        pair = of_stage[stage].pair
        if pair is not None and back.kind is Kind.B:
            return scale * pair
        return cost[kind, stage] + cost[back.kind, back.stage]

    every_hop = (hops[0] if hops else 0.0, 0.0) if len(hops) <= 1 else None

    def hop_seconds(send: Instruction, source: int, target: int) -> tuple[float, float]:  # noqa: ARG001 - all values alike
        return every_hop or (max(hops[min(source, target) : max(source, target)]), 0.0)

    return Prices(
        seconds=seconds, hop_seconds=hop_seconds, held=activations(placement, kept_for_weights), slowdown=slowdown
    )


def activations(placement: Placement, kept_for_weights: float = 1.0) -> Callable[[Instruction], tuple[float, float]]:
    """Return the memory changes of each instruction, in microbatch-stages: one microbatch on a rank's whole stage."""
    share = placement.share
    freed_by_input = -share * (1 - kept_for_weights)
    freed_by_weights = -share * kept_for_weights
    table = {
        Kind.F: (share, 0.0),
        Kind.I: (0.0, freed_by_input),
        Kind.W: (0.0, freed_by_weights),
        Kind.B: (0.0, -share),
        Kind.OFFLOAD: (0.0, -share),
        Kind.RELOAD: (share, 0.0),
    }

    nothing = (0.0, 0.0)

    def held(instruction: Instruction) -> tuple[float, float]:
        change = table.get(instruction.kind, nothing)
        if instruction.beside is None:
            return change
        other = table[instruction.beside.kind]
        return change[0] + other[0], change[1] + other[1]

    return held


def free() -> Prices:
    """Return prices of zero, so that only the order matters."""
    return Prices(seconds=lambda *_: 0.0, hop_seconds=lambda *_: (0.0, 0.0), held=lambda _: (0.0, 0.0))
