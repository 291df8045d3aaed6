"""What the engines can run today, of a module and of a world. What plans compose is in `planner.composition`."""

from torch import nn

from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan


def check_alone(plan: Plan) -> None:
    """Refuse a plan that one process cannot run by itself: of a pipeline it can run every rank."""
    if plan.num_ranks > plan.pp:
        axes = ",".join(f"{axis}={getattr(plan, axis)}" for axis in ("dp", "tp", "cp") if getattr(plan, axis) > 1)
        raise ShardwiseError(
            f"{axes} needs processes: one alone runs all ranks of a pipeline (pp), and of no other axis",
            remedy=f"sw.spawn(fn, devices={plan.num_ranks}), or torchrun --nproc-per-node {plan.num_ranks}",
        )


def check_module(module: nn.Module) -> None:
    """Refuse a module with nothing to train."""
    parameters = list(module.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise ShardwiseError(
            f"none of the {len(parameters)} parameters of {type(module).__name__} requires a gradient, so there is"
            " nothing to train",
            remedy="module.requires_grad_()",
        )


def check_compiles(plan: Plan) -> None:
    """Refuse to compile what talks to other ranks inside of a block."""
    axes = ",".join(f"{axis}={getattr(plan, axis)}" for axis in ("tp", "cp", "ep") if getattr(plan, axis) > 1)
    if axes:
        raise ShardwiseError(
            f"compile with {axes}: ranks talk to each other inside of a block, and a compiled block cannot yet",
            remedy="compile=False, or a plan of dp and pp, with any zero",
        )
