"""Simulate a step again from its trace: first as it was, then with a change.

The duration of each instruction, and the order on each rank, are read from the trace; the simulator does the rest. A
prediction is the difference of two such simulations, so effects that neither models cancel out.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from statistics import median
from typing import NamedTuple

from shardwise.errors import ShardwiseError
from shardwise.schedule.catalogue import CATALOGUE, make_schedule
from shardwise.schedule.instruction import Instruction, Kind, parse
from shardwise.schedule.passes.lower import lower
from shardwise.schedule.placement import Placement
from shardwise.schedule.prices import Prices, activations
from shardwise.schedule.schedule import Schedule
from shardwise.schedule.simulate import simulate
from shardwise.trace.events import Event, Lane, Trace
from shardwise.trace.memory import peaks

#: A larger step is not simulated: a dozen schedules are tried while the user waits.
_MOST_COMPUTATIONS = 8_000
#: Schedules that change the results, or hold two copies of the model, are not suggested for a slow step.
_NO_REMEDY = frozenset(name for name, entry in CATALOGUE.items() if entry.num_weight_copies > 1) | {"pipedream-2bw"}

Seconds = Callable[[Instruction, int], float]


class Alternative(NamedTuple):
    """Another schedule: what to put in the plan, how long the step would be, and the most that a rank would hold."""

    plan: str
    seconds: float
    held: float


@dataclass(frozen=True)
class Replay:
    """The step of a trace, ready to be simulated. Ranks are those of one pipeline, the slowest if there are several.

    Each instruction has overheads that do not shrink with its microbatch: `host_seconds` pass before it, and
    `fixed_seconds` are part of its measured time. With `keeps_hop`, a transfer of a smaller microbatch takes just as
    long. `units`, if known, has for each stage the fraction of the stage's time that each of its units takes: a model
    can be cut into other stages only between units.
    """

    schedule: Schedule
    measured: Mapping[tuple[int, str], float]
    usual: Mapping[tuple[Kind, int], float]
    hop: float
    ranks: tuple[int, ...]
    host_seconds: float = 0.0
    fixed_seconds: float = 0.0
    keeps_hop: bool = False
    units: tuple[tuple[float, ...], ...] = ()

    @staticmethod
    def of(trace: Trace) -> "Replay | None":
        """Return the replay of a trace; None if its events are no instructions, or too many to simulate at once."""
        ranks = _slowest_pipeline(trace)
        try:
            orders = [[parse(event.name) for event in trace.compute[rank]] for rank in ranks]
        except ShardwiseError:
            return None
        if not orders or not all(orders) or sum(map(len, orders)) > _MOST_COMPUTATIONS:
            return None
        schedule = _schedule_of(trace.name, orders)
        measured = {
            (place, event.name): event.seconds for place, rank in enumerate(ranks) for event in trace.compute[rank]
        }
        return Replay(schedule, measured, _usual(orders, measured), _hop(trace, set(ranks)), ranks)

    @cached_property
    def seconds(self) -> float:
        """The simulated seconds of the step as it was."""
        return self._play(self._as_measured)

    @cached_property
    def usual_seconds(self) -> float:
        """The step with every instruction at its usual duration: the baseline of all changes except one."""
        return self._play(self._as_usual)

    @cached_property
    def held(self) -> float:
        """The peak memory of any rank, in microbatch-stages."""
        return max(peaks(simulate(lower(self.schedule), self._prices(self.schedule, self._as_usual))))

    @cached_property
    def stage_seconds(self) -> list[float]:
        """Seconds of a microbatch on each stage, forward and backward together."""
        return [
            sum(self.usual[kind, stage] for kind in (Kind.F, Kind.I, Kind.W))
            for stage in range(self.schedule.placement.num_stages)
        ]

    def predicted(self, trace: Trace) -> Trace:
        """Return the trace as it would be if every instruction took its usual time, the same in all pipelines."""
        played = simulate(lower(self.schedule), self._prices(self.schedule, self._as_usual, self.hop))
        events: list[Event] = []
        for ranks in pipelines_of(trace):
            first = len(events)
            for event in played.events:
                peer = None if event.peer is None else ranks[event.peer]
                after = None if event.after is None else event.after + first
                events.append(event._replace(rank=ranks[event.rank], peer=peer, after=after))
        return Trace(name=trace.name, num_ranks=trace.num_ranks, events=tuple(events))

    @cached_property
    def unit_seconds(self) -> list[float]:
        """Seconds of a microbatch on each unit; empty if the units are unknown."""
        stages = zip(self.stage_seconds, self.units, strict=True) if self.units else ()
        return [seconds * share for seconds, shares in stages for share in shares]

    def with_stages(self, factors: Mapping[int, float]) -> float:
        """Return the step's seconds with the durations of some stages multiplied by factors."""

        def seconds(instruction: Instruction, place: int) -> float:
            return sum(self._as_usual(part, place) * factors.get(part.stage, 1.0) for part in instruction.parts)

        return self._play(seconds)

    def with_even_instructions(self, ranks: Sequence[int]) -> float:
        """Return the step's seconds with no instruction of some ranks slower than usual. Its baseline is `seconds`."""
        chosen = {place for place, rank in enumerate(self.ranks) if rank in ranks}

        def seconds(instruction: Instruction, place: int) -> float:
            usual, found = self._as_usual(instruction, place), self._as_measured(instruction, place)
            return min(usual, found) if place in chosen else found

        return self._play(seconds)

    def with_backward(self, factors: Mapping[int, float]) -> float:
        """Return the step's seconds with the backwards of some ranks multiplied by factors."""

        def seconds(instruction: Instruction, place: int) -> float:
            factor = factors.get(self.ranks[place], 1.0) if instruction.kind in (Kind.B, Kind.I) else 1.0
            return factor * self._as_usual(instruction, place)

        return self._play(seconds)

    def with_microbatches(self, count: int) -> float | None:
        """Return the step's seconds with the same batch cut into `count` microbatches; None if that is impossible."""
        found = self._remade(self.schedule.name, count)
        if found is None:
            return None
        size = self.schedule.num_microbatches / count

        def seconds(instruction: Instruction, place: int) -> float:
            usual = self._as_usual(instruction, place)
            fixed = min(self.fixed_seconds, usual)
            return fixed + (usual - fixed) * size

        return self._play(seconds, schedule=found, hop=self.hop if self.keeps_hop else self.hop * size)

    @cached_property
    def alternatives(self) -> list[Alternative]:
        """Other schedules for the same ranks and microbatches, the quickest first.

        In each, the model is cut over the stages as evenly as its units allow. If the units are unknown, the cost
        within each present stage is taken as uniform.
        """
        found = []
        for name in CATALOGUE:
            other = None if name in _NO_REMEDY else self._remade(name, self.schedule.num_microbatches)
            if other is None or name == self.schedule.name:
                continue
            if self.units and other.placement.num_stages > len(self.unit_seconds):
                continue
            prices = self._prices(other, self._spread(other), self.hop)
            trace = simulate(lower(other), prices)
            found.append(Alternative(f"schedule={name}", trace.makespan, max(peaks(trace))))
        return sorted(found, key=lambda each: each.seconds)

    def _remade(self, name: str, num_microbatches: int) -> Schedule | None:
        if name not in CATALOGUE or len(self.schedule.placement.pipes) > 1:
            return None
        is_same = name == self.schedule.name and CATALOGUE[name].any_chunks_from is not None
        chunks = self.schedule.placement.num_chunks if is_same else None
        with suppress(ShardwiseError):
            return make_schedule(name, self.schedule.num_ranks, num_microbatches, chunks)
        return None

    def _spread(self, other: Schedule) -> Seconds:
        """Return the durations for another number of stages: the cost along the model, cut anew."""
        many, few = other.placement.num_stages, self.schedule.placement.num_stages

        def shared(stage: int, old: int) -> float:
            """Return the fraction of an old stage that is in a new one."""
            return few * max(0.0, min((stage + 1) / many, (old + 1) / few) - max(stage / many, old / few))

        def by_units(stage: int, old: int) -> float:
            return sum(share for of, share in cut[stage] if of == old)

        placed = [(stage, share) for stage, shares in enumerate(self.units) for share in shares]
        counts = iter(even_cut(self.unit_seconds, many) if placed else [])
        ends = list(accumulate(counts))
        cut = [placed[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        part = by_units if placed else shared
        table = {
            (kind, stage): sum(self.usual[kind, old] * part(stage, old) for old in range(few))
            for kind in (Kind.F, Kind.I, Kind.W, Kind.B)
            for stage in range(many)
        }
        return lambda each, _: sum(table.get((part.kind, part.stage), 0.0) for part in each.parts)

    def _as_measured(self, instruction: Instruction, place: int) -> float:
        found = self.measured.get((place, str(instruction)))
        return self._as_usual(instruction, place) if found is None else found

    def _as_usual(self, instruction: Instruction, place: int) -> float:  # noqa: ARG002 - a stage has one rank
        return sum(self.usual.get((part.kind, part.stage), 0.0) for part in instruction.parts)

    def _play(self, seconds: Seconds, *, schedule: Schedule | None = None, hop: float | None = None) -> float:
        played = schedule or self.schedule
        return simulate(lower(played), self._prices(played, seconds, self.hop if hop is None else hop)).makespan

    def _prices(self, schedule: Schedule, seconds: Seconds, hop: float = 0.0) -> Prices:
        def with_host(instruction: Instruction, place: int) -> float:
            taken = seconds(instruction, place)
            return taken + self.host_seconds if taken > 0 else taken

        return Prices(seconds=with_host, hop_seconds=lambda *_: (hop, 0.0), held=activations(schedule.placement))


def predict(trace: Trace) -> Trace | None:
    """Return a trace as it would be if every instruction took its usual time; None as in `Replay.of`."""
    replay = Replay.of(trace)
    return None if replay is None else replay.predicted(trace)


def ranks_by_stages(trace: Trace) -> dict[tuple[int, ...], list[int]]:
    """Return the ranks grouped by the stages that they compute."""
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, events in enumerate(trace.compute):
        found[tuple(sorted({event.stage for event in events}))].append(rank)
    return found


def pipelines_of(trace: Trace) -> list[tuple[int, ...]]:
    """Return the pipelines. Ranks with the same stages are replicas: the first of each form a pipeline, and so on."""
    alike = ranks_by_stages(trace)
    alike.pop((), None)
    return list(zip(*(alike[stages] for stages in sorted(alike)), strict=False))


def _slowest_pipeline(trace: Trace) -> tuple[int, ...]:
    return max(pipelines_of(trace), key=lambda ranks: sum(trace.busy[rank] for rank in ranks), default=())


def _schedule_of(name: str, orders: list[list[Instruction]]) -> Schedule:
    """Return the schedule that the ranks have run, computation only."""
    ranks: dict[int, int] = {}
    ways: dict[int, set[int]] = defaultdict(set)
    for place, order in enumerate(orders):
        for instruction in order:
            for part in instruction.parts:
                ranks[part.stage] = place
                ways[part.microbatch].add(part.stage)
    pipes = tuple(dict.fromkeys(tuple(sorted(ways[microbatch])) for microbatch in sorted(ways)))
    placement = Placement(ranks=tuple(ranks[stage] for stage in range(max(ranks) + 1)), pipes=pipes)
    return Schedule.of(name, placement, max(ways) + 1, orders)


def _usual(orders: list[list[Instruction]], measured: Mapping[tuple[int, str], float]) -> dict[tuple[Kind, int], float]:
    """Return the median of each kind on each stage. A full backward counts as two equal halves, two halves as a full.

    In an overlapped pair, a part that was also seen alone takes its time alone, and the other part the rest.
    """
    found: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    ran = [(measured[place, str(each)], each) for place, order in enumerate(orders) for each in order]
    for seconds, instruction in ran:
        if len(instruction.parts) == 1:
            found[instruction.kind, instruction.stage].append(seconds)
    alone = _with_halves({key: median(values) for key, values in found.items()})
    found.clear()
    for seconds, instruction in ran:
        parts = [(part.kind, part.stage) for part in instruction.parts]
        unknown = [key for key in parts if key not in alone]
        left = max(seconds - sum(alone[key] for key in parts if key in alone), 0.0)
        weights = {kind: 2.0 if kind is Kind.B else 1.0 for kind, _ in unknown}
        for key in unknown:
            found[key].append(left * weights[key[0]] / sum(weights[kind] for kind, _ in unknown))
    usual = _with_halves({**alone, **{key: median(values) for key, values in found.items()}})
    for _, stage in list(usual):
        for kind in (Kind.F, Kind.I, Kind.W, Kind.B):
            usual.setdefault((kind, stage), 0.0)
    return usual


def _with_halves(usual: Mapping[tuple[Kind, int], float]) -> dict[tuple[Kind, int], float]:
    """Add the full backward from its halves, and halves from a full backward."""
    completed = dict(usual)
    for kind, stage in usual:
        if kind is Kind.B:
            completed.setdefault((Kind.I, stage), usual[kind, stage] / 2)
            completed.setdefault((Kind.W, stage), usual[kind, stage] / 2)
        elif (Kind.B, stage) not in usual and kind in (Kind.I, Kind.W):
            completed[Kind.B, stage] = usual.get((Kind.I, stage), 0.0) + usual.get((Kind.W, stage), 0.0)
    return completed


def _hop(trace: Trace, ranks: set[int]) -> float:
    """Return the seconds of a transfer: if measured, the median over transfers that were awaited before being sent."""
    if not trace.is_measured:
        sends = [event.seconds for event in trace.events if event.lane is Lane.SEND and event.rank in ranks]
        return median(sends) if sends else 0.0
    took = []
    for event in trace.events:
        if event.lane is Lane.RECEIVE and event.after is not None and event.rank in ranks:
            send = trace.events[event.after]
            if event.start <= send.start:
                took.append(event.end - send.start)
    return median(took) if took else 0.0


def even_cut(costs: Sequence[float], num_stages: int) -> list[int]:
    """Return the number of units of each stage, in order, minimizing the cost of the most expensive stage."""
    sums = [0.0, *accumulate(costs)]
    # For each number of leading units: the cost of their most expensive stage, and how they are cut.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for _ in range(num_stages):
        after: dict[int, tuple[float, list[int]]] = {}
        for start, (so_far, cut) in best.items():
            for end in range(start + 1, len(sums)):
                dearest = max(so_far, sums[end] - sums[start])
                if end not in after or dearest < after[end][0] - 1e-12:
                    after[end] = dearest, [*cut, end - start]
        best = after
    return best[len(costs)][1]
