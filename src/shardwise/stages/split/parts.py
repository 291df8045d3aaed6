"""Each stage's part of a run: its calls, the values it reads and writes, and the tensors it holds, by name."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from shardwise.errors import ShardwiseError
from shardwise.stages.split.cut import Cut
from shardwise.stages.split.sources import Drawn, HeldTensor, Hidden, Made, Source
from shardwise.stages.split.unit_flow import UnitFlow


@dataclass(frozen=True, kw_only=True)
class StagePart:
    """One stage's part of a run."""

    stage: int
    calls: range
    is_last: bool
    #: Values from other stages, and values for other stages: the output of a call, and its name.
    reads: Mapping[Made, str]
    writes: Mapping[Made, str]
    #: Parameters and buffers, by their first names in the original module.
    holds: frozenset[str]


def make_parts(module: nn.Module, units: Mapping[str, nn.Module], flow: UnitFlow, cut: Cut) -> tuple[StagePart, ...]:
    """Return the part of each stage of a cut."""
    stage_of = {call: stage for stage, calls in enumerate(cut) for call in calls}
    needs: list[set[Source]] = [set().union(*(flow.calls[call].needs for call in calls)) for calls in cut]
    needs[-1] |= flow.output_needs
    _check_hidden(flow, needs, stage_of)
    _check_drawn(needs)
    reads = [
        sorted(each for each in needed if isinstance(each, Made) and stage_of[each.call] != stage)
        for stage, needed in enumerate(needs)
    ]
    names = {made: name_of(flow.calls[made.call].name, made.leaf) for stage in reads for made in stage}
    holds = _holdings(module, units, flow, cut, needs)
    return tuple(
        StagePart(
            stage=stage,
            calls=calls,
            is_last=stage == len(cut) - 1,
            reads={made: names[made] for made in reads[stage]},
            writes={made: names[made] for made in sorted(names) if stage_of[made.call] == stage},
            holds=holds[stage],
        )
        for stage, calls in enumerate(cut)
    )


def name_of(call: str, leaf: int) -> str:
    """Return the name of a value that goes from stage to stage: a leaf of what a call returns."""
    return f"{call}:{leaf}"


def inseparable_calls(flow: UnitFlow) -> list[tuple[int, int]]:
    """Return pairs of calls that must be on one stage: the later uses a result that the earlier did not return, or one
    checkpoint of the module's own is around both: its backward runs both again."""
    last = len(flow.calls) - 1
    users = [*((index, call.needs) for index, call in enumerate(flow.calls)), (last, flow.output_needs)]
    pairs = [
        (each.call, user) for user, needs in users for each in needs if isinstance(each, Hidden) and each.call != user
    ]
    return pairs + _in_one_checkpoint(flow)


def _in_one_checkpoint(flow: UnitFlow) -> list[tuple[int, int]]:
    """Return the first and the last call of each checkpoint that is around several."""
    last = {call.checkpoint: index for index, call in enumerate(flow.calls) if call.checkpoint is not None}
    return [(first, end) for first, end in last.items() if first != end]


def describe_pairs(flow: UnitFlow, pairs: Sequence[tuple[int, int]]) -> str:
    """Explain why calls cannot be separated, with the first pair as an example."""
    if not pairs:
        return ""
    maker, user = pairs[0]
    names = f"{flow.calls[maker].name} and {flow.calls[user].name}"
    if pairs[0] in _in_one_checkpoint(flow):
        return f"that one checkpoint (torch.utils.checkpoint) is around, which runs all of them again: {names}"
    return f"that share what they do not return: {names}{describe_leak(flow, maker)}"


def received_bytes(flow: UnitFlow, first: int, end: int) -> int:
    """Return the bytes that a stage of calls `first` to `end - 1` would read from other stages."""
    needs: set[Source] = set().union(*(call.needs for call in flow.calls[first:end]))
    if end == len(flow.calls):
        needs |= flow.output_needs
    made = [
        flow.calls[each.call].outline.leaves[each.leaf]
        for each in needs
        if isinstance(each, Made) and each.call < first
    ]
    return sum(math.prod(each.shape) * each.dtype.itemsize for each in made)


def _check_hidden(flow: UnitFlow, needs: Sequence[set[Source]], stage_of: Mapping[int, int]) -> None:
    for stage, needed in enumerate(needs):
        for each in needed:
            if isinstance(each, Hidden) and stage_of[each.call] != stage:
                raise ShardwiseError(
                    f"stage {stage} uses something from inside {flow.calls[each.call].name} of stage"
                    f" {stage_of[each.call]} that the unit does not return{describe_leak(flow, each.call)}",
                    remedy="return it from the unit, or cut so that both are on one stage",
                )


def describe_leak(flow: UnitFlow, call: int) -> str:
    """Describe how a value left a call without being returned, and where it is used."""
    used = flow.leaks.get(call, "what the module returns")
    return f" (a hook or an attribute carries it, or it is written in place; used by {used})"


def _check_drawn(needs: Sequence[set[Source]]) -> None:
    drawn = [{each for each in needed if isinstance(each, Drawn)} for needed in needs]
    for each in set().union(*drawn):
        stages = [stage for stage, among in enumerate(drawn) if each in among]
        if len(stages) > 1:
            raise ShardwiseError(
                f"random numbers drawn outside any unit, at {each.where}, are used on stages"
                f" {', '.join(map(str, stages))}, and each would draw its own",
                remedy="draw them in a module with parameters or in nn.Dropout, or pass them in the batch",
            )


def _holdings(
    module: nn.Module, units: Mapping[str, nn.Module], flow: UnitFlow, cut: Cut, needs: Sequence[set[Source]]
) -> list[frozenset[str]]:
    """Return the parameters and buffers of each stage. An unused one goes to the stage of the one before it."""
    first_names = {id(each): name for name, each in [*module.named_parameters(), *module.named_buffers()]}
    owned = {
        name: {first_names[id(each)] for each in [*unit.parameters(), *unit.buffers()]} for name, unit in units.items()
    }
    holds: list[set[str]] = []
    for stage, calls in enumerate(cut):
        held = {each.name for each in needs[stage] if isinstance(each, HeldTensor)}
        for call in calls:
            held |= owned[flow.calls[call].unit] | flow.calls[call].touched
        holds.append(held)
    in_units = set().union(*owned.values())
    everywhere = {first_names[id(each)] for each in module.buffers()} - in_units
    at = 0
    for name in first_names.values():
        stages = [stage for stage, held in enumerate(holds) if name in held]
        at = stages[0] if stages else at
        if not stages:
            holds[at].add(name)
    return [frozenset(held | everywhere) for held in holds]
