"""Lower bounds over all schedules, ZeRO stages, recomputations and balances, to prune layouts before pricing."""

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
    """Return a lower bound of a step's seconds for these axes and microbatches: stages are balanced and never idle."""
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
    """Return a lower bound of a rank's bytes: states are sharded as far as possible, and one microbatch is in flight.

    `offloads` are the largest shares of optimizer, parameters and activations that may be on the host.
    Full recomputation saves only inputs but needs memory for the layer being recomputed, so the smaller of no
    recomputation and full recomputation counts.
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
    # Some rank has at least 1/pp of the layers. At best it has neither embedding nor head.
    dealt = Deal(nothing, model.num_layers / layouts.pp, nothing, nothing)
    places = typical_places(model, lean, dealt)
    # Weights in fp32 are their own master weights, and ZeRO-3 shards them too.
    shared = replace(software, saves_casts=False)
    held = step_bytes(model, pool.device, lean, places, sequence=sequence, software=shared)
    # Under ZeRO-3 there are no whole weights. Gathered layers and fragmentation are left out of this bound.
    alone = (layouts.dp * layouts.cp == 1)[:, None]
    parts = {name: part for name, part in held.parts.items() if name != "fragments"}
    # Without recomputation, no memory for a layer being recomputed is needed.
    at_work = parts["recomputed"] * (recompute == 2)
    return replace(held, parts={**parts, "weights": parts["weights"] * alone, "recomputed": at_work})
