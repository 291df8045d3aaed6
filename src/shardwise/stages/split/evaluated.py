"""The stages of evaluations, where a module computes something else in evaluation mode than in training.

    training      a | aux  b | head             the output has the auxiliary head's scores too
    evaluation    a |      b | head             the output has what `a` returned too

Each stage has the weights of training. Which units it calls, what these return, and what goes from stage to stage are
those of a run in evaluation mode.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

from torch import nn

from shardwise.stages.split.flow import watch
from shardwise.stages.split.forecast import Forecast
from shardwise.stages.split.module_stage import ModuleStage
from shardwise.stages.split.parts import StagePart, make_parts
from shardwise.stages.split.script_values import asks_for_mode, names_in_classes, sets_mode
from shardwise.stages.split.sources import HeldTensor, Made, Sources
from shardwise.stages.split.unit_flow import UnitFlow
from shardwise.stages.stage import Batch, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The flow of a module in evaluation mode, and each stage's part of it."""

    flow: UnitFlow
    parts: tuple[StagePart, ...]
    forecast: Forecast

    def of(self, split: Split) -> Split:
        """Return the stages of evaluations, once those of training have all that an engine gives them."""
        return replace(
            split,
            stages=tuple(
                self._stage(each, part) if isinstance(each, ModuleStage) else each
                for each, part in zip(split.stages, self.parts, strict=True)
            ),
            reads=tuple(tuple(part.reads.values()) for part in self.parts),
            writes=tuple(tuple(part.writes.values()) for part in self.parts),
            makers={name: part.stage for part in self.parts for name in part.writes.values()},
            units=tuple(tuple(self.flow.calls[call].name for call in part.calls) for part in self.parts),
            shapes_by_data=split.shapes_by_data or self.flow.shapes_by_data,
        )

    def _stage(self, stage: ModuleStage, part: StagePart) -> ModuleStage:
        made = copy(stage)
        made.flow, made.part, made.forecast = self.flow, part, self.forecast
        if len(self.parts) > 1:
            made.in_order = stage.in_order or ""  # Other stages run the others, and all run the same.
        return made


def find_evaluated(
    module: nn.Module, units: Mapping[str, nn.Module], example: Batch, flow: UnitFlow, parts: Sequence[StagePart]
) -> Evaluated | None:
    """Run the module in evaluation mode; None if stages serve it as they are, or if they cannot.

    Then evaluations report which units they call, or `engine/tried_again.py` reports what these need.
    """
    if not asks_for_mode(module) or sets_mode(module):
        return None
    training = [each for each in module.modules() if each.training]
    for each in training:
        each.training = False
    try:
        found = watch(module, units, example)
        cut = _cut(found, flow, parts)
        made = None if cut is None else make_parts(module, units, found, cut)
    except Exception:  # The evaluation will report what is wrong.
        return None
    finally:
        for each in training:
            each.training = True
    if made is None or _is_served(found, made, flow, parts) or not _holds_all(found, made, parts):
        return None
    return Evaluated(flow=found, parts=made, forecast=Forecast(units, example))


def with_gradients(module: nn.Module, units: Mapping[str, nn.Module], example: Batch, flow: UnitFlow) -> UnitFlow:
    """Return the flow with what stages need in training too, where a forward asks whether gradients are on."""
    if not names_in_classes(module, "is_grad_enabled"):
        return flow
    try:
        found = watch(module, units, example, with_gradients=True)
    except Exception:  # Training will report what is wrong.
        return flow
    if not _are_alike(found, flow):
        return flow
    calls = tuple(
        replace(one, needs=one.needs | _made(other.needs)) for one, other in zip(flow.calls, found.calls, strict=True)
    )
    return replace(flow, calls=calls, output_needs=flow.output_needs | _made(found.output_needs))


def _made(needs: Sources) -> Sources:
    return frozenset(each for each in needs if isinstance(each, Made))


def _cut(found: UnitFlow, flow: UnitFlow, parts: Sequence[StagePart]) -> tuple[range, ...] | None:
    """Return the calls of each stage: those of its units. None if a stage would have to come twice."""
    stage_of = {flow.calls[call].name: part.stage for part in parts for call in part.calls}
    stages: list[int] = []
    for call in found.calls:
        before = stages[-1] if stages else 0
        fitting = [part.stage for part in parts if part.stage >= before and call.touched <= part.holds]
        stages.append(stage_of.get(call.name, min(fitting, default=-1)))
    if stages != sorted(stages) or -1 in stages:
        return None
    ends = [sum(stage <= part.stage for stage in stages) for part in parts]
    return tuple(range(start, end) for start, end in zip([0, *ends], ends, strict=False))


def _is_served(found: UnitFlow, made: Sequence[StagePart], flow: UnitFlow, parts: Sequence[StagePart]) -> bool:
    """Whether the stages of training give to each other what evaluations need."""
    return _are_alike(found, flow) and all(
        one.reads.keys() <= other.reads.keys() for one, other in zip(made, parts, strict=True)
    )


def _are_alike(found: UnitFlow, flow: UnitFlow) -> bool:
    """Whether two runs call the same units, which return tensors in the same places."""
    return [call.name for call in found.calls] == [call.name for call in flow.calls] and all(
        one.outline.tree == other.outline.tree and one.outline.tensors.keys() == other.outline.tensors.keys()
        for one, other in zip(found.calls, flow.calls, strict=True)
    )


def _holds_all(found: UnitFlow, made: Sequence[StagePart], parts: Sequence[StagePart]) -> bool:
    """Whether each stage has the weights that it reads in evaluations."""
    needs = [[*(found.calls[call].needs for call in part.calls)] for part in made]
    needs[-1].append(found.output_needs)
    return all(
        {each.name for some in needed for each in some if isinstance(each, HeldTensor)} <= part.holds
        and all(found.calls[call].touched <= part.holds for call in mine.calls)
        for needed, mine, part in zip(needs, made, parts, strict=True)
    )
