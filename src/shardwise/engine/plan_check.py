"""Whether the processes that there are can run a plan, before anything is made."""

from shardwise.errors import ShardwiseError
from shardwise.planner.composition import check_composition
from shardwise.planner.plan import Plan
from shardwise.ranks.faults import Watch
from shardwise.ranks.mesh import agree_on


def check_here(plan: Plan, watch: Watch | None, *, compiles: bool) -> None:
    """Refuse a plan that ranks do not share, or that does not fit them; alone (no watch), what one cannot run."""
    if watch is not None:
        agree_on(plan, watch)
        plan.check_world(watch.num_ranks)
    check_composition(plan)
    if watch is None:
        _check_alone(plan)
    elif compiles:
        check_compiles(plan)


def _check_alone(plan: Plan) -> None:
    """Refuse a plan that one process cannot run by itself: of a pipeline it can run every rank."""
    if plan.num_ranks > plan.pp:
        axes = ",".join(f"{axis}={getattr(plan, axis)}" for axis in ("dp", "tp", "cp") if getattr(plan, axis) > 1)
        raise ShardwiseError(
            f"{axes} needs processes: one alone runs all ranks of a pipeline (pp), and of no other axis",
            remedy=f"sw.spawn(fn, devices={plan.num_ranks}), or torchrun --nproc-per-node {plan.num_ranks}",
        )


def check_compiles(plan: Plan) -> None:
    """Refuse to compile what talks to other ranks inside of a block."""
    axes = ",".join(f"{axis}={getattr(plan, axis)}" for axis in ("tp", "cp", "ep") if getattr(plan, axis) > 1)
    if axes:
        raise ShardwiseError(
            f"compile with {axes}: ranks talk to each other inside of a block, and a compiled block cannot yet",
            remedy="compile=False, or a plan of dp and pp, with any zero",
        )
