"""How far a predicted step may be off: an interval in which nine of ten measured steps lie."""

from collections.abc import Mapping

import numpy as np

from shardwise.cost.numbers import Floats

# How far each part may be off, as a share of itself, at nine in ten. Chosen so that the interval of the whole, parts
# taken as independent, holds nine in ten of the quality A rows of published/runs.csv; validate prints how many it
# does.
_SPREAD: Mapping[str, float] = {
    "compute": 0.14,
    "recompute": 0.14,
    "tp": 0.40,
    "cp": 0.60,
    "ep": 0.60,
    "bubble": 0.40,
    "hops": 0.60,
    "dp": 0.60,
    "optimizer": 0.60,
    "offload": 0.60,
    "other": 1.00,
}
# Mixtures of experts differ more: what is fused and graphed changes with every release.
_EXPERT_COMPUTE = 0.35


def spread(parts: Mapping[str, Floats], seconds: Floats, *, has_experts: bool) -> Floats:
    """The half width of the interval, as a share of the whole: it reaches from t / (1 + w) to t (1 + w)."""
    total = np.zeros_like(seconds)
    for name, part in parts.items():
        share = _EXPERT_COMPUTE if has_experts and name == "compute" else _SPREAD[name]
        total = total + (share * part / seconds) ** 2
    return np.sqrt(total)
