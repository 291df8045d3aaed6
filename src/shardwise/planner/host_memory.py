"""Host memory that a plan needs, against what is available: one error for the planner, `train` and the engines."""

import math

from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.units import counted, format_bytes


def check_host_memory(plan: Plan, needed: float, *, num_ranks: int, available: float) -> None:
    """Raise an error if the `num_ranks` of a plan on one machine need more host memory than is available."""
    if needed <= available:
        return
    parts = [f"offload.{name}={share:g}" for name, share in _shares(plan)]
    raise ShardwiseError(
        f"{' and '.join(parts)} of {counted(num_ranks, 'rank')} of this machine needs {format_bytes(needed)} of"
        f" pinned memory on its host, which has {format_bytes(available)} available"
        f" ({format_bytes(needed - available)} short)",
        remedy=", or ".join(_remedies(plan, available / needed)),
    )


def _shares(plan: Plan) -> list[tuple[str, float]]:
    every = {name: getattr(plan.offload, name) for name in ("optimizer", "parameters", "activations")}
    return [(name, share) for name, share in every.items() if share]


def _remedies(plan: Plan, fitting: float) -> list[str]:
    """Return smaller shares, in hundredths, that fit; and a ZeRO stage that shards the state over replicas."""
    shares = [(name, math.floor(100 * share * fitting) / 100) for name, share in _shares(plan)]
    found = [",".join(f"offload.{name}={share:g}" for name, share in shares)]
    replicas = plan.dp * plan.cp
    if plan.offload.parameters and plan.zero < 3 and replicas > 1:
        found.append("zero=3")
    elif plan.offload.optimizer and plan.zero == 0 and replicas > 1:
        found.append("zero=1")
    return found
