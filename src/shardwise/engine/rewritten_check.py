"""Check parameters that forwards write themselves, such as an EMA teacher or clamped weights.

That is correct if a rank's forward has the whole parameter, once, and all replicas write the same values to it.
"""

from collections.abc import Iterator, Mapping

from shardwise.engine.compiled_check import check_compiled
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.ranks.wires import Wires
from shardwise.stages.split.write_guard import Rewritten
from shardwise.stages.stage import Split

_REMEDY = (
    "write it between steps: engine.load_state_dict, or in place in engine.module under dp with zero=0; what follows"
    " other weights, or rows, may be a buffer of the unit that reads it; microbatches=1 if it is written once in a step"
)


def check_forward(split: Split, plan: Plan, wires: Wires) -> None:
    """Refuse parameters that a forward writes to, and compiled code around its layers, under plans that cannot have
    them. All ranks call this alike."""
    check_compiled(split.compiled, plan)
    _check_rewritten(split.rewritten, plan, wires)


def _check_rewritten(rewritten: Mapping[str, Rewritten], plan: Plan, wires: Wires) -> None:
    """Refuse what a plan would lose, or write twice."""
    for name, each in rewritten.items():
        reason = next(_reasons(each, plan), None)
        if reason is not None:
            raise ShardwiseError(f"the forward writes to the parameter {name}, and {reason}", remedy=_REMEDY)
    if plan.dp == 1 or plan.ep > 1:
        return
    # Replicas have the same stages and the same parts of layers.
    place = tuple(wires.mesh.coordinates[axis] for axis in ("pp", "tp"))
    told = wires.gather((place, {name: each.total for name, each in rewritten.items()}))
    for name in rewritten:
        if any(len({each.get(name) for other, each in told if other == one}) > 1 for one, _ in told):
            raise ShardwiseError(
                f"the forward writes to the parameter {name}, and {plan.dp} replicas have different ones: each has"
                " seen its own rows of the batch",
                remedy=_REMEDY,
            )


def _reasons(each: Rewritten, plan: Plan) -> Iterator[str]:
    if plan.zero == 3:
        yield "under zero=3 what it writes to is gathered for the forward alone"
    if plan.offload.parameters:
        yield "under offload.parameters what it writes to is on the device for the forward alone"
    if plan.precision != "fp32":
        yield f"under precision={plan.precision} it is made anew from weights in full precision"
    if plan.cp > 1:
        yield f"under cp={plan.cp} each rank's forward sees other tokens"
    if plan.recompute != "none" and not each.settles:
        yield f"under recompute={plan.recompute} a second forward would write to it again"
    if plan.microbatches > 1 and each.moves:
        yield (
            f"under microbatches={plan.microbatches} it would be written so many times in a step, and each microbatch"
            " be computed with other values"
        )
    if each.how == "memory" and (plan.zero or plan.offload.optimizer):
        yield "gives it other memory (weight.data = ...), which its optimizer does not have"
    if plan.pp > 1 and each.in_glue:
        yield f"outside of the units that pp={plan.pp} puts on stages: each stage would write its own"
    if plan.pp > 1 and each.how == "in place":
        yield f"under pp={plan.pp} other microbatches are in flight, whose backwards need it as it was"
