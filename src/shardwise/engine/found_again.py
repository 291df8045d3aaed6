"""What trials find of a module with values that were set, and of its evaluations, and what of it goes against how the
module was cut."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import NamedTuple

from torch import nn

from shardwise.engine.valued_copy import ValuedCopy, WasSet
from shardwise.errors import ShardwiseError, some
from shardwise.planner.plan import Plan
from shardwise.sharding.context.parallel import Unfit
from shardwise.sharding.tensor.shard import Apart
from shardwise.stages.loss_kind import LossKind, Tried
from shardwise.stages.rows import unmarked
from shardwise.stages.split.flow import watch
from shardwise.stages.split.parts import name_of
from shardwise.stages.split.sources import Made
from shardwise.stages.split.switch import uncompiled
from shardwise.stages.split.unit_flow import UnitFlow
from shardwise.stages.stage import Batch, Split

AGAIN = "state = engine.state_dict(), then sw.parallelize(module, ...) again and engine.load_state_dict(state)"


class Found(NamedTuple):
    """The result of trials: the kind of the loss, the layers that can be sharded, what each unit's calls read, and what
    each stage needs of others."""

    tried: Tried = Tried(LossKind.UNTRIED)
    apart: Apart = Apart()
    read: Mapping[str, frozenset[str]] = {}
    needs: Sequence[frozenset[str]] = ()
    #: Under cp, the sequences that cannot be in parts; None if that is unknown.
    unfit: Unfit | None = None


class Flow(NamedTuple):
    """The tensors that each unit reads, those read between units under the empty name; and the values of other stages
    that each stage needs, by name, none if other units run than those of the stages."""

    read: Mapping[str, frozenset[str]]
    needs: Sequence[frozenset[str]]


def flow_of(module: nn.Module, stages: Sequence[Sequence[str]], batch: Batch, *, has_buffers: bool) -> Flow:
    """Run a module. `stages` are the names of calls of units, and with `has_buffers` all units have all buffers."""
    units = list(dict.fromkeys(call.partition("#")[0] for calls in stages for call in calls))
    flow = watch(module, {name: module.get_submodule(name) for name in units}, batch)
    there = frozenset(name for name, _ in module.named_buffers()) if has_buffers else frozenset()
    read = {unit: frozenset[str]().union(*[c.touched for c in flow.calls if c.unit == unit]) for unit in units}
    # A unit has its own tensors.
    others = {unit: {name for name in names if not name.startswith(f"{unit}.")} for unit, names in read.items()}
    found = {unit: frozenset(names - there) for unit, names in {**others, "": flow.in_glue}.items()}
    return Flow(found, _needs_of(flow, stages))


def _needs_of(flow: UnitFlow, stages: Sequence[Sequence[str]]) -> list[frozenset[str]]:
    stage_of = {name: stage for stage, calls in enumerate(stages) for name in calls}
    if [call.name for call in flow.calls] != list(stage_of):
        return []
    found: list[set[str]] = [set() for _ in stages]
    users = [*((call.name, call.needs) for call in flow.calls), (flow.calls[-1].name, flow.output_needs)]
    for name, needs in users:
        made = [(flow.calls[each.call].name, each.leaf) for each in needs if isinstance(each, Made)]
        found[stage_of[name]] |= {name_of(*each) for each in made if stage_of[each[0]] != stage_of[name]}
    return [frozenset(each) for each in found]


def makers(values: Iterable[str]) -> str:
    """Name the calls that make these values."""
    return some(list(dict.fromkeys(each.rpartition(":")[0] for each in values)))


def check_cuts(begin: str, before: Found, now: Found, plan: Plan) -> None:
    """Refuse what goes against how layers were cut, shared out, or come."""
    mixed = before.apart.mixed_in(now.apart)
    if mixed:
        wholes = ", ".join(f'"{name}": "whole"' for name in mixed[:2])
        raise ShardwiseError(
            f"{begin} {some(mixed)} cannot be cut over {plan.tp} ranks, as tp={plan.tp} has done:"
            " channels see each other, or are counted, or others read their weight, or a layer behind is whole",
            remedy=f"tensor={{{wholes}}} in sw.parallelize; or the value set before it is called",
        )
    if now.apart.unshared and not before.apart.unshared:
        raise ShardwiseError(
            f"{begin} nothing can be shared out along the sequence, as sp=true has done: {now.apart.unshared}",
            remedy="sp=false in the plan",
        )
    for unit, names in now.read.items():
        more = sorted(names - before.read.get(unit, names))
        if more:
            raise ShardwiseError(
                f"{begin} {unit} reads {some(more)}, which it did not when the engine was made, and which is not"
                f" there for it ({plan})",
                remedy=AGAIN,
            )
    for stage, (needed, before_it) in enumerate(zip(now.needs, before.needs, strict=False)):
        more = sorted(needed - before_it)
        if more:
            raise ShardwiseError(
                f"{begin} stage {stage} needs what {makers(more)} of another stage returns, which it did not when the"
                f" engine was made, and which is not sent to it ({plan})",
                remedy=AGAIN,
            )


#: What an evaluation may have that training had not.
_OTHER, _SET = "other entries or attributes", "other attributes, set by a train() of the module's own,"


class EvaluationTrial:
    """Tries evaluations on copies, once for each kind of batch: of modules that `ask` for the mode, or `set` something
    with it, which may compute something else than training; and with other entries or values than the example."""

    def __init__(self, plan: Plan, *, asks: bool, sets: bool) -> None:
        self._plan, self._asks, self._sets = plan, asks, sets
        #: Whether weights are present only for units that were seen to read them.
        self._comes = plan.pp > 1 or plan.zero == 3 or plan.offload.parameters > 0
        self._tried: set[Hashable] = set()
        #: The stages of evaluations. Set later.
        self.split: Split | None = None
        #: What is wrong, in evaluation mode, with the layers that are cut over tp. Set later.
        self.find_fault: Callable[[nn.Module, Batch], str] | None = None

    def check(
        self, copy: ValuedCopy, batch: Batch, kind: Hashable, pending: Sequence[WasSet], *, is_other: bool,
        around: Callable[[], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        """Refuse an evaluation of which a stage reads weights or values that do not come to it, or in which layers that
        are cut see each other. `pending` are values that the copy has not got."""
        by_flow = self.split if self._comes and (self._asks or (self._plan.pp > 1 and is_other)) else None
        find_fault = self.find_fault if is_other or self._sets else None
        if kind in self._tried or (by_flow is None and find_fault is None):
            return
        self._tried.add(kind)
        flows, fault, given = None, "", unmarked(batch)
        copy.set(pending)
        try:
            with suppress(Exception), around(), uncompiled():  # The evaluation will report what is wrong.
                flows = None if by_flow is None else self._flows(copy, given, by_flow)
                fault = "" if find_fault is None else find_fault(copy.again().eval(), given)
        finally:
            copy.set([each._replace(now=each.was) for each in reversed(pending)])
        if flows is not None and by_flow is not None:
            self._compare(*flows, by_flow.reads)
        if fault:
            raise ShardwiseError(
                f"this evaluation has {_OTHER if is_other else _SET} than the example, and with them the layers that"
                f" tp={self._plan.tp} has cut do not give what the whole module gives: {fault}",
                remedy=f"the entries and attributes of the example; or {AGAIN}",
            )

    def _flows(self, copy: ValuedCopy, batch: Batch, split: Split) -> tuple[Flow, Flow]:
        """Return what units read in training and in evaluation mode."""
        training, evaluation = (
            flow_of(copy.again().train(trains), split.units, batch, has_buffers=self._plan.pp == 1)
            for trains in (True, False)
        )
        return training, evaluation

    def _compare(self, training: Flow, evaluation: Flow, reads: Sequence[Sequence[str]]) -> None:
        """Refuse weights that only evaluations read, and values that do not come to a stage; `reads` are those that
        do."""
        for unit, names in evaluation.read.items():
            more = sorted(names - training.read[unit])
            if more:
                raise ShardwiseError(
                    f"in evaluation mode {unit or 'the forward of the module'} reads {some(more)}, which it does not in"
                    f" training, and which is not there for it ({self._plan})",
                    remedy="call the layer that has it, in both modes; or read it in training too",
                )
        for stage, (needed, come) in enumerate(zip(evaluation.needs, reads, strict=False)):
            more = sorted(needed.difference(come))
            if more:
                raise ShardwiseError(
                    f"in this evaluation stage {stage} needs what {makers(more)} of another stage returns, which it did"
                    f" not when the engine was made, and which is not sent to it ({self._plan})",
                    remedy=f"the entries and attributes of the example; or {AGAIN}",
                )
