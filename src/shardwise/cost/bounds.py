"""What no schedule, ZeRO stage, recomputation or balance can better: for pruning before anything is priced."""

from dataclasses import replace

import numpy as np

from shardwise.cluster.cluster import Cluster, Pool
from shardwise.cost.constants import CONSTANTS, Constants
from shardwise.cost.deal import Deal
from shardwise.cost.layouts import Layouts
from shardwise.cost.memory import StepBytes, step_bytes
from shardwise.cost.numbers import Floats
from shardwise.cost.places import typical_places
from shardwise.cost.software import Software
from shardwise.cost.stage import Pricer
from shardwise.model.model import Model


def least_seconds(
    model: Model, cluster: Cluster, layouts: Layouts, *, sequence: int, software: Software,
    constants: Constants = CONSTANTS,
) -> Floats:  # fmt: skip
    """Seconds below which no step of these axes and microbatches can be: all stages equally busy, and never idle."""
    plain = replace(layouts, recompute=np.zeros_like(layouts.recompute))
    found = np.zeros(len(layouts))
    for pool in cluster.pools:
        pricer = Pricer(model=model, pool=pool, software=software, constants=constants, sequence=sequence)
        stages = pricer.stages(plain)
        others = np.maximum(layouts.pp - 2, 0)
        through = stages.first.total + others * stages.middle.total + np.where(layouts.pp > 1, stages.last.total, 0.0)
        least = layouts.num_microbatches * through / layouts.pp + pricer.constants.step_seconds
        found = np.maximum(found, least)
    return found


def least_bytes(
    model: Model, pool: Pool, layouts: Layouts, *, sequence: int, software: Software, offloads: Floats,
) -> StepBytes:  # fmt: skip
    """Bytes of the leanest ranks: states shared out as far as they can be, one microbatch under way.

    `offloads` are the largest shares of optimizer, parameters and activations that may be on the host.
    Recomputation keeps only inputs but needs room for a layer at work, so nothing or everything is recomputed,
    whichever takes less.
    """
    none, full = (_lean(model, pool, layouts, sequence, software, offloads, choice) for choice in (0, 2))
    is_leaner = (full.peak < none.peak)[:, None]
    parts = {name: np.where(is_leaner, full.parts[name], part) for name, part in none.parts.items()}
    return replace(none, parts=parts)


def _lean(
    model: Model, pool: Pool, layouts: Layouts, sequence: int, software: Software, offloads: Floats, recompute: int
) -> StepBytes:
    lean = Layouts.of(
        **{name: getattr(layouts, name) for name in ("dp", "tp", "pp", "cp", "ep", "microbatch", "sequence_parallel")},
        recompute=recompute,
        zero=np.where(layouts.dp * layouts.cp > 1, 2, 0),
        offload_optimizer=offloads[0],
        offload_parameters=offloads[1],
        offload_activations=offloads[2],
    )
    nothing = np.zeros(len(layouts))
    # Some rank has its share of the layers; the ends have none at best.
    dealt = Deal(nothing, model.num_layers / layouts.pp, nothing, nothing)
    places = typical_places(model, lean, dealt)
    # Weights in fp32, which are their own masters, are shared out under ZeRO-3 too.
    shared = replace(software, saves_casts=False)
    held = step_bytes(model, pool.device, lean, places, sequence=sequence, software=shared)
    # Under ZeRO-3 there are no whole weights. What it gathers instead is left out here, and so are fragments.
    alone = (layouts.dp * layouts.cp == 1)[:, None]
    parts = {name: part for name, part in held.parts.items() if name != "fragments"}
    # Activations that stay need no room for a layer at work.
    at_work = parts["recomputed"] * (recompute == 2)
    return replace(held, parts={**parts, "weights": parts["weights"] * alone, "recomputed": at_work})
