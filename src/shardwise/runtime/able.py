"""What the engines can run today. All else is refused here, before anything is split, built or launched."""

from torch import nn

from shardwise.errors import ShardwiseError
from shardwise.planner.plan import AXES, Plan

_MOST_CHUNKS_OF_AUTO = 2


def check_plan(plan: Plan) -> None:
    """Refuse a plan that is right in itself, but that no engine runs yet."""
    axes = [f"{axis}={getattr(plan, axis)}" for axis in AXES if axis != "pp" and getattr(plan, axis) > 1]
    if axes:
        raise ShardwiseError(
            f"{','.join(axes)}: the engines run pipelines (pp), and no other axis yet", remedy=f"pp={plan.num_ranks}"
        )
    if plan.zero:
        raise ShardwiseError(
            f"zero={plan.zero} shards over dp, and the engines run pipelines (pp) alone yet", remedy="zero=0"
        )
    offloaded = [name for name in ("optimizer", "parameters", "activations") if getattr(plan.offload, name)]
    if offloaded:
        raise ShardwiseError(
            f"offload.{offloaded[0]}={getattr(plan.offload, offloaded[0]):g}: the engines keep everything on the"
            " device yet",
            remedy=f"offload.{offloaded[0]}=0"
            + (", and recompute=full to hold less" if offloaded[0] == "activations" else ""),
        )
    if plan.recompute == "selective":
        raise ShardwiseError(
            "recompute=selective: the engines recompute all of a stage's forward or nothing yet",
            remedy="recompute=full, or recompute=none",
        )
    if plan.precision == "fp16":
        raise ShardwiseError(
            "precision=fp16 needs its loss scaled, which the engines do not do yet", remedy="precision=bf16"
        )
    _check_schedule(plan)


def _check_schedule(plan: Plan) -> None:
    if plan.schedule == "auto" and plan.chunks is not None and plan.chunks > _MOST_CHUNKS_OF_AUTO:
        raise ShardwiseError(
            f"schedule=auto makes 1 or {_MOST_CHUNKS_OF_AUTO} chunks on a rank, not {plan.chunks}",
            remedy=f"chunks={_MOST_CHUNKS_OF_AUTO}, or schedule=interleaved",
        )
    if plan.schedule == "auto" and plan.layers is not None:
        counts = [plan.pp * chunks for chunks in range(1, (plan.chunks or _MOST_CHUNKS_OF_AUTO) + 1)]
        if len(plan.layers) not in counts:
            raise ShardwiseError(
                f"layers is for {len(plan.layers)} stages, but schedule=auto over pp={plan.pp} makes "
                f"{' or '.join(map(str, counts))}",
                remedy=f"layers={'+'.join(['4'] * plan.pp)}",
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
