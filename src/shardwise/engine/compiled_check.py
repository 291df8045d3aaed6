"""Refuse a function that the user compiles around several units, where a rank does not have all weights at any time.

    class Net(nn.Module):
        @torch.compile
        def forward(self, x):           one graph of all layers: it reads their weights, and calls no layer

Weights that arrive late, are gathered for a unit, or are on another stage come when the unit is called. A compiled
layer is no problem: what brings its weights is outside of it.
"""

from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan


def axes_that_bring_weights(plan: Plan) -> str:
    """Return what of a plan brings the weights of a layer when it is called; empty if a rank has all at any time."""
    away = [f"{axis}={getattr(plan, axis)}" for axis in ("pp", "tp", "cp", "ep") if getattr(plan, axis) > 1]
    away += [f"zero={plan.zero}"] if plan.zero else []
    kinds = ("optimizer", "parameters", "activations")
    return ", ".join([*away, *(f"offload.{kind}" for kind in kinds if getattr(plan.offload, kind))])


def check_compiled(compiled: str | None, plan: Plan) -> None:
    """Refuse the compiled function of this name under a plan whose units are more than their code."""
    away = axes_that_bring_weights(plan)
    if compiled is not None and away:
        raise ShardwiseError(
            f"{compiled} is compiled by torch.compile and calls layers: the compiled code reads their weights"
            f" by itself, and under {away} these come when a layer is called",
            remedy="the function from before torch.compile, and parallelize(..., compile=True); or layer.compile() of"
            " each layer",
        )
