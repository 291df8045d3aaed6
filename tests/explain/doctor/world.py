"""A machine and a model that are known wholly: what a plan takes there, and the run that the doctor sees of it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from shardwise.schedule.catalogue import make_schedule
from shardwise.schedule.instruction import Instruction, Kind
from shardwise.schedule.passes.lower import lower
from shardwise.schedule.prices import Prices, activations
from shardwise.schedule.replay import even_cut
from shardwise.schedule.simulate import simulate
from shardwise.trace.events import Holding, Lane, Trace, Traffic
from shardwise.trace.memory import peaks
from shardwise.trace.run import Choice, Run, Unit
from tests.explain.doctor.patients import as_measured

_PARTS = {Kind.F: 1 / 3, Kind.B: 2 / 3, Kind.I: 1 / 3, Kind.W: 1 / 3}
#: Bytes of gradients and of optimizer state for each of weights.
_STATE = {"parameters": 1.0, "gradients": 1.0, "optimizer": 2.0}


class TrueStep(NamedTuple):
    seconds: float
    fullest_bytes: float


@dataclass(frozen=True, kw_only=True)
class World:
    """Units in seconds of the whole batch and bytes; what the host needs before each instruction, and a hop of a row.

    `rows` are those of a batch. `knows_units` says whether a run tells what its units cost.
    """

    units: tuple[Unit, ...]
    rows: int = 64
    host_seconds: float = 0.0
    latency: float = 0.0
    activation_bytes: float = 0.0
    memory_bytes: float | None = None
    knows_units: bool = True

    def cut(self, plan: Mapping[str, str]) -> list[int]:
        """The plan's own, or the evenest."""
        stages = make_schedule(plan["schedule"], int(plan["pp"]), int(plan["microbatches"])).placement.num_stages
        told = [int(each) for each in plan["layers"].split("+")] if "layers" in plan else []
        return told if len(told) == stages else even_cut([unit.cost for unit in self.units], stages)

    def can_run(self, plan: Mapping[str, str]) -> bool:
        """Whether there is a unit for each stage."""
        made = make_schedule(plan["schedule"], int(plan["pp"]), int(plan["microbatches"]))
        return made.placement.num_stages <= len(self.units)

    def play(self, plan: Mapping[str, str]) -> tuple[Trace, list[list[Unit]]]:
        """The step as it goes there, and the units of each stage."""
        made = lower(make_schedule(plan["schedule"], int(plan["pp"]), int(plan["microbatches"])))
        ends = list(accumulate(self.cut(plan)))
        stages = [list(self.units[start:end]) for start, end in zip([0, *ends], ends, strict=False)]

        def seconds(instruction: Instruction, rank: int) -> float:  # noqa: ARG001 - a stage has one rank
            parts = [each for each in instruction.parts if each.kind in _PARTS]
            cost = sum(_PARTS[each.kind] * sum(unit.cost for unit in stages[each.stage]) for each in parts)
            return cost / made.num_microbatches + self.host_seconds if parts else 0.0

        hop = (self.latency, 0.0)
        prices = Prices(seconds=seconds, hop_seconds=lambda *_: hop, held=activations(made.placement))
        trace = simulate(made, prices)
        state = {owner: [0.0] * trace.num_ranks for owner in _STATE}
        for stage, rank in enumerate(made.placement.ranks):
            for owner, factor in _STATE.items():
                state[owner][rank] += factor * sum(unit.weight_bytes for unit in stages[stage])
        state["activations"] = [held * self.activation_bytes / made.num_microbatches for held in peaks(trace)]
        holdings = [
            Holding(rank, owner, trace.start, held) for owner, ranks in state.items() for rank, held in enumerate(ranks)
        ]
        return replace(trace, holdings=tuple(holdings)), stages

    def truth(self, plan: Mapping[str, str]) -> TrueStep:
        trace, _ = self.play(plan)
        held = [sum(each.num_bytes for each in trace.holdings if each.rank == rank) for rank in range(trace.num_ranks)]
        return TrueStep(trace.makespan, max(held))

    def run(self, plan: Mapping[str, str]) -> Run:
        """What the doctor sees: a measured step, in which the host's seconds belong to no instruction."""
        trace, stages = self.play(plan)
        events = tuple(
            each._replace(start=each.start + self.host_seconds) if each.lane is Lane.COMPUTE else each
            for each in trace.events
        )
        seen = as_measured(replace(trace, events=events))
        # A wait is over when a value is there; then the host begins.
        waits = {each for each in seen.events if each.lane is Lane.RECEIVE}
        events = tuple(
            each._replace(end=max(each.end - self.host_seconds, each.start)) if each in waits else each
            for each in seen.events
        )
        sends = [each for each in trace.events if each.lane is Lane.SEND and each.peer is not None]
        traffic = tuple(Traffic(each.rank, each.peer, "values", 1, 4096.0) for each in sends)
        return Run(
            name="run",
            trace=replace(seen, events=events, traffic=traffic),
            plan=tuple(Choice(key=key, value=value) for key, value in plan.items()),
            facts={"batch": str(self.rows), "layers": "+".join(str(len(stage)) for stage in stages)},
            memory_bytes=self.memory_bytes,
            units=tuple(map(tuple, stages)) if self.knows_units else (),
        )
