"""How many microbatches a rank holds at its fullest, by schedule and place (facts 1.1)."""

import numpy as np

from shardwise.cost.layouts import Layouts
from shardwise.cost.numbers import Floats
from shardwise.cost.pipeline import SCHEDULES


def in_flight(layouts: Layouts, rank: Floats) -> Floats:
    """Microbatches of a rank's whole stage that it holds, at most. `rank` counts stages from the first.

    1F1B holds one for each stage from its own to the last; interleaved, chunks of 2(p-r-1) + (v-1)p + 1 microbatches.
    Zero bubble schedules hold activations until the weight gradient: the closed forms say with M_W = M_B.
    """
    p, v, m = (each.astype(np.float64) for each in (layouts.pp, layouts.chunks, layouts.num_microbatches))
    ahead = p - rank
    looped = (2 * (p - rank - 1) + (v - 1) * p + 1) / v
    held = {
        "1f1b": ahead,
        "gpipe": m,
        "interleaved": np.where(v > 1, looped, ahead),
        "looped-bfs": m,
        "zb-h1": p,
        "zb-h2": 2 * p - 1,
        "zb-v": p,
        "v-half": (p + 2) // 2,
        "v-min": (p + 4) // 3,
        "dualpipe": p + 1,
        "dualpipe-v": p + 0.5,
        "eager-1f1b": 2 * ahead - 1,
        "chimera": p,
        "hanayo": p,
    }
    table = [np.broadcast_to(held[name], m.shape) for name in SCHEDULES]
    held_by_schedule: Floats = np.choose(layouts.schedule, table)
    return np.minimum(held_by_schedule, m)
