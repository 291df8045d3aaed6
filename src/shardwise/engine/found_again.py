"""What trials find of a module with values that were set, and what of it goes against how the module was cut."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from shardwise.errors import ShardwiseError, some
from shardwise.planner.plan import Plan
from shardwise.sharding.context.parallel import Unfit
from shardwise.sharding.tensor.shard import Apart
from shardwise.stages.loss_kind import LossKind, Tried
from shardwise.stages.split.flow import watch
from shardwise.stages.split.sources import Made
from shardwise.stages.split.unit_flow import UnitFlow
from shardwise.stages.stage import Batch

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
    """The tensors that each unit reads, those read between units under the empty name; and the values of calls on other
    stages that each stage needs, none if other units run than those of the stages."""

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
        made = {flow.calls[each.call].name for each in needs if isinstance(each, Made)}
        found[stage_of[name]] |= {each for each in made if stage_of[each] != stage_of[name]}
    return [frozenset(each) for each in found]


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
                f"{begin} stage {stage} needs what {some(more)} of another stage returns, which it did not when the"
                f" engine was made, and which is not sent to it ({plan})",
                remedy=AGAIN,
            )
