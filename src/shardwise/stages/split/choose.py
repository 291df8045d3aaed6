"""Choose the units, and where to cut between them.

    find_units ──> watch ──> cut ──> does a unit hold up all the others, or are there too few?
         ^      one run of the        │ yes: open it              │ no
         │      module                │                           v
         └────────────────────────────┘                   `_refine`, if `through_blocks`: open the blocks at the cuts,
                                                           watch and cut once more, and keep that if it is faster

Every iteration runs the module once more on the example, without side effects: buffers and generators are restored.

Units are coarse at first. They are opened, the costliest first, until there are as many calls as stages, and until no
unit that could be opened holds up all the others. Whole blocks seldom divide evenly: 8 blocks and a head that costs as
much as 1.3 of them make stages of 5 and 4.3. On request the blocks on both sides of a cut are opened too, and the cut
goes through one if that makes a step faster. This is not the default: a residual then arrives by two paths, and its
gradients are summed in another order than in one process, so that they differ in their last bits.
Even stages are not always the fastest: a last stage that begins one forward late should have that much less work.
So a caller that knows the schedule passes a `judge`, and the cut is moved as long as the judge rates it better.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import nn

from shardwise.errors import ShardwiseError
from shardwise.stages.split.cut import Cut, best_cut, given_cut
from shardwise.stages.split.flow import FLOPS_OF_A_BYTE, watch
from shardwise.stages.split.parts import describe_pairs, inseparable_calls, make_parts, received_bytes
from shardwise.stages.split.remembered import num_remembered, remembering
from shardwise.stages.split.stopwatch import Stopwatch
from shardwise.stages.split.unit_flow import UnitCall, UnitFlow
from shardwise.stages.split.units import can_open, find_units, holds_blocks
from shardwise.stages.split.without_gradients import without_gradients_explained
from shardwise.stages.stage import Batch

#: A stage of one unit that takes this much longer than the mean is opened, if there are blocks inside.
_UNEVEN = 1.25
#: A cut between whole blocks is good enough if no stage takes this much longer than the mean,
_EVEN_ENOUGH = 1.03
#: and one through a block must be this much faster.
_WORTH_OPENING = 0.98


@dataclass(frozen=True, kw_only=True)
class SplitOptions:
    """The options of a cut. By default it balances time, estimated from FLOPs and bytes of units on the example."""

    num_stages: int
    #: The user's own cut: the number of units or blocks of each stage, or the names of the stages' first units.
    cut: Sequence[int] | Sequence[str] | None = None
    #: The costs of units by name; the speed of each stage; and the limit of parameter bytes of a stage.
    costs: Mapping[str, float] | None = None
    speeds: Sequence[float] | None = None
    limit_bytes: float | None = None
    #: Whether the cut may go through the middle of a block, so that a step takes as little time as possible.
    through_blocks: bool = False
    #: Gives all ranks the same costs if they hold shards of different sizes, so that they choose the same cut.
    agree: Callable[[Sequence[UnitCall]], None] | None = None
    #: Times units. Without it their cost is estimated from FLOPs and bytes.
    stopwatch: Stopwatch | None = None
    #: Returns the time of a step with stages of these costs; by default that of the slowest.
    judge: Callable[[Sequence[float]], float] = max


class TooFewUnitsError(ShardwiseError):
    """More stages are requested than a module has units."""

    def __init__(self, problem: str, *, remedy: str | None = None, num_units: int = 0) -> None:
        super().__init__(problem, remedy=remedy)
        self.num_units = num_units


#: Units by name, what flows between them, and the cut.
Chosen = tuple[dict[str, nn.Module], UnitFlow, Cut]


def choose(
    module: nn.Module, example: Batch, options: SplitOptions, probe: Callable[[Any], None] | None = None
) -> Chosen:
    """Return the units, the data flow between them on the example, and the cut. `probe` gets the module's output."""
    if options.num_stages < 1:
        raise ShardwiseError(
            f"a module cannot be split into {options.num_stages} stages", remedy="num_stages=1 or more"
        )
    opened: set[str] = set()
    closed: set[str] = set()
    units = find_units(module)
    flow = _watch(module, units, example, options, probe)
    while True:
        where = None if len(flow.calls) < options.num_stages else _cut(module, units, flow, options)
        more = [name for name in _to_open(module, units, flow, where, options) if name not in closed]
        if not more:
            break
        finer_units = find_units(module, opened | set(more))
        finer = _watch(module, finer_units, example, options)
        if len(finer.calls) <= len(flow.calls):
            closed |= set(more)  # Its pieces are not called one by one, as in nn.MultiheadAttention.
            continue
        opened |= set(more)
        units, flow = finer_units, finer
    if not flow.calls:
        if options.num_stages == 1 and next(module.parameters(), None) is not None:
            return units, flow, (range(0),)  # All of it is the module's own forward: a linear layer alone.
        raise ShardwiseError(
            f"{type(module).__name__} calls no module that has parameters, so there are no units to put on stages",
            remedy="its parameters in submodules that its forward calls",
        )
    if where is None:
        names = ", ".join(call.name for call in flow.calls)
        raise TooFewUnitsError(
            f"{options.num_stages} stages are asked for, but {type(module).__name__} has only {len(flow.calls)} units"
            f" to divide: {names}",
            remedy=f"at most {len(flow.calls)} stages",
            num_units=len(flow.calls),
        )
    return _refine(module, example, options, opened, (units, flow, where))


def _watch(
    module: nn.Module,
    units: dict[str, nn.Module],
    example: Batch,
    options: SplitOptions,
    probe: Callable[[Any], None] | None = None,
) -> UnitFlow:
    functions = remembering(module)
    before = num_remembered(functions)
    with without_gradients_explained():
        flow = watch(module, units, example, probe)
    if num_remembered(functions) != before:
        # The run filled a cache that units share. Run again: each process makes its own cache, so none is sent.
        flow = watch(module, units, example)
    if options.stopwatch is not None:
        called = {call.unit: units[call.unit] for call in flow.calls}
        options.stopwatch.time(module, called, example, flow.calls)
    if options.agree is not None:
        options.agree(flow.calls)
    return flow


def _refine(module: nn.Module, example: Batch, options: SplitOptions, opened: set[str], coarse: Chosen) -> Chosen:
    """Return a cut through blocks if that is worth it; otherwise the coarse one."""
    _, flow, where = coarse
    if not options.through_blocks or options.cut is not None or options.costs is not None or options.num_stages < 2:
        return coarse
    seconds = _stage_seconds(flow, where, options)
    ideal = sum(costs_of(flow, options)) / sum(options.speeds or [1.0] * len(where))
    if options.judge is max and max(seconds) <= _EVEN_ENOUGH * ideal:
        return coarse
    at_cuts = [flow.calls[at].unit for calls in where[1:] for at in (calls.start - 1, calls.start)]
    finer_units = find_units(module, opened | {name for name in at_cuts if can_open(module, name)})
    finer = _watch(module, finer_units, example, options)
    if len(finer.calls) <= len(flow.calls):
        return coarse
    try:
        finer_where = _moved(finer, _cut(module, finer_units, finer, options), options)
        make_parts(module, finer_units, finer, finer_where)
    except ShardwiseError:  # Units in a block share a value that cannot be sent, or glue in it draws at random.
        return coarse
    gains = options.judge(_stage_seconds(finer, finer_where, options)) <= _WORTH_OPENING * options.judge(seconds)
    return (finer_units, finer, finer_where) if gains else coarse


def _moved(flow: UnitFlow, where: Cut, options: SplitOptions) -> Cut:
    """Move each boundary of the cut, one call at a time, as long as the judge rates it better."""
    if options.judge is max or options.limit_bytes is not None:
        return where  # Already optimal; and only `best_cut` respects a limit on bytes.
    pairs = inseparable_calls(flow)
    best, shortest = where, options.judge(_stage_seconds(flow, where, options))
    moves = [(boundary, by) for boundary in range(1, len(where)) for by in (-1, 1)]
    while moves:
        boundary, by = moves.pop(0)
        starts = [calls.start for calls in best]
        at = starts[boundary] = starts[boundary] + by
        ends = [*starts[1:], len(flow.calls)]
        if any(first >= end for first, end in zip(starts, ends, strict=True)):
            continue
        if any(first < at <= last for first, last in pairs):
            continue
        moved = tuple(range(first, end) for first, end in zip(starts, ends, strict=True))
        taken = options.judge(_stage_seconds(flow, moved, options))
        if taken < shortest:
            best, shortest = moved, taken
            moves.append((boundary, by))
    return best


def _stage_seconds(flow: UnitFlow, where: Cut, options: SplitOptions) -> list[float]:
    """Return the time of each stage, receives included, in the unit of `costs_of`."""
    costs, speeds = costs_of(flow, options), options.speeds or [1.0] * len(where)
    return [
        (sum(costs[call] for call in calls) + FLOPS_OF_A_BYTE * received_bytes(flow, calls.start, calls.stop)) / speed
        for calls, speed in zip(where, speeds, strict=True)
    ]


def _to_open(
    module: nn.Module, units: Mapping[str, nn.Module], flow: UnitFlow, where: Cut | None, options: SplitOptions
) -> list[str]:
    """Return units to open: those that are never called although glue uses their tensors, and those too large."""
    called = {call.unit for call in flow.calls}
    bypassed = [
        name
        for name in units
        if name not in called and can_open(module, name) and any(held.startswith(f"{name}.") for held in flow.in_glue)
    ]
    if bypassed:
        return bypassed
    if where is None:
        by_cost = sorted(zip(costs_of(flow, options), flow.calls, strict=True), key=lambda pair: -pair[0])
        can = dict.fromkeys(call.unit for _, call in by_cost if can_open(module, call.unit))
        return list(can)[: options.num_stages - len(flow.calls)]
    if options.cut is not None:
        return []
    costs = costs_of(flow, options)
    stage_costs = [sum(costs[call] for call in calls) for calls in where]
    slowest = where[stage_costs.index(max(stage_costs))]
    unit = flow.calls[slowest.start].unit
    is_uneven = len(slowest) == 1 and max(stage_costs) > _UNEVEN * sum(stage_costs) / len(where)
    return [unit] if is_uneven and holds_blocks(units[unit]) else []


def _cut(module: nn.Module, units: Mapping[str, nn.Module], flow: UnitFlow, options: SplitOptions) -> Cut:
    names = [call.name for call in flow.calls]
    if options.cut is not None:
        return given_cut(options.cut, names, _blocks(units, flow), options.num_stages)
    sizes = {name: each.numel() * each.element_size() for name, each in module.named_parameters()}

    def stage_bytes(first: int, end: int) -> float:
        held = set(chain.from_iterable(flow.calls[call].touched for call in range(first, end)))
        return sum(sizes.get(name, 0) for name in held)

    def received(first: int, end: int) -> float:
        if options.costs is not None:
            return 0.0  # The given costs are in units of their own, to which bytes cannot be added.
        return FLOPS_OF_A_BYTE * received_bytes(flow, first, end)

    pairs = inseparable_calls(flow)
    return best_cut(
        costs_of(flow, options),
        options.num_stages,
        received=received,
        speeds=options.speeds,
        stage_bytes=stage_bytes,
        limit_bytes=options.limit_bytes,
        inseparable=pairs,
        reason=describe_pairs(flow, pairs),
    )


def costs_of(flow: UnitFlow, options: SplitOptions) -> list[float]:
    """Return the cost of each call in FLOPs. Its weights count as bytes once: a step reads and writes them anyway.

    If all calls were timed, their seconds are scaled so that the total stays the same.
    """
    costs = [call.flops + FLOPS_OF_A_BYTE * (call.bytes + call.weight_bytes) for call in flow.calls]
    seconds = [call.seconds for call in flow.calls if call.seconds is not None]
    if seconds and len(seconds) == len(costs):
        rate = sum(costs) / sum(seconds)
        costs = [rate * each for each in seconds]
    given = options.costs or {}
    return [given.get(call.unit, cost) for call, cost in zip(flow.calls, costs, strict=True)]


def _blocks(units: Mapping[str, nn.Module], flow: UnitFlow) -> list[int]:
    """Return the indices of calls of blocks: the class of units that does most of the work."""
    # Classes are compared by name: wrapping a module gives it a new class.
    kinds = {name: (type(each).__module__, type(each).__name__) for name, each in units.items()}
    work: dict[tuple[str, str], float] = {}
    for call in flow.calls:
        work[kinds[call.unit]] = work.get(kinds[call.unit], 0.0) + call.flops + call.bytes
    block = max(work, key=lambda kind: work[kind])
    return [index for index, call in enumerate(flow.calls) if kinds[call.unit] == block]
