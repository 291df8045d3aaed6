"""Candidates made of candidates: each with every choice of one kind beneath it, as further rows."""

from dataclasses import fields, replace

import numpy as np

from shardwise.cost.layouts import Layouts
from shardwise.cost.numbers import Floats
from shardwise.cost.pipeline import SCHEDULES
from shardwise.planner.search.choices import Schedules
from shardwise.schedule.catalogue import CATALOGUE

# Schedules under which the model is held once.
_ONCE = np.array([CATALOGUE[name].num_weight_copies == 1 for name in SCHEDULES])


def with_schedules(
    layouts: Layouts, schedules: Schedules, recomputations: list[tuple[int, float]], num_layers: int
) -> Layouts:
    """Each layout under every schedule that it may have, with every recomputation."""
    allowed = schedules.allowed(layouts.pp, layouts.num_microbatches, num_layers)
    rows, chosen = np.nonzero(allowed)
    count = len(recomputations)
    codes, shares = (np.array(column) for column in zip(*recomputations, strict=True))
    found = layouts.take(np.repeat(rows, count))
    chosen = np.repeat(chosen, count)
    return replace(
        found,
        schedule=schedules.code[chosen],
        chunks=schedules.chunks[chosen],
        recompute=np.tile(codes, len(rows)),
        recompute_share=np.tile(shares, len(rows)),
    )


def with_zeros(layouts: Layouts, zeros: list[tuple[int, int]]) -> Layouts:
    """Each layout under every ZeRO stage that its replicas allow.

    A group is of the replicas of one domain of fast links: smaller by the tensor parallel ranks between them.
    """
    stages, domains = (np.array(column) for column in zip(*zeros, strict=True))
    replicas = (layouts.dp * layouts.cp)[:, None]
    groups = np.where(domains > 0, np.maximum(domains // layouts.tp[:, None], 1), 0)
    allowed = ((stages == 0) | (replicas > 1)) & ((groups == 0) | ((groups > 1) & (groups < replicas)))
    allowed &= (groups == 0) | (replicas % np.maximum(groups, 1) == 0)
    rows, chosen = np.nonzero(allowed)
    return replace(layouts.take(rows), zero=stages[chosen], zero_group=groups[rows, chosen])


def with_offloads(layouts: Layouts, offloads: Floats) -> Layouts:
    """Each layout with every choice of what lives on the host."""
    found = layouts.take(np.repeat(np.arange(len(layouts)), len(offloads)))
    return with_offload(found, np.tile(offloads, (len(layouts), 1)))


def with_offload(layouts: Layouts, offload: Floats) -> Layouts:
    """Each layout with its own choice: shares of optimizer, parameters and activations.

    Parameters stay where ranks hold them twice (`composition.py`).
    """
    parameters = np.where(holds_once(layouts), offload[:, 1], 0.0)
    return replace(
        layouts, offload_optimizer=offload[:, 0], offload_parameters=parameters, offload_activations=offload[:, 2]
    )


def holds_once(layouts: Layouts) -> np.ndarray:
    """Whether each pipeline holds the model once."""
    return np.asarray(_ONCE[layouts.schedule])


def joined(parts: list[Layouts]) -> Layouts:
    """Several layouts as one."""
    return Layouts(
        **{each.name: np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(Layouts)}
    )
