"""Seconds of a pipeline by closed forms: how long a step is, given what one microbatch takes on each stage.

The forms are those of facts 1.1 and 1.2, which the simulator of `schedule/` reproduces; here they are for many
candidates at once. Stages may differ at the ends (embedding, head): a microbatch passes every stage once, and the
slowest sets the pace.
"""

from typing import NamedTuple

import numpy as np

from shardwise.cost.compute import Seconds
from shardwise.cost.numbers import Floats, Number
from shardwise.schedule.catalogue import CATALOGUE

SCHEDULES = (
    "1f1b", "gpipe", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe", "dualpipe-v",
    "eager-1f1b", "chimera", "hanayo",
)  # fmt: skip


#: Schedules whose backward has two halves, by index.
SPLITS_BACKWARD = [index for index, name in enumerate(SCHEDULES) if CATALOGUE[name].splits_backward]


class Span(NamedTuple):
    """A pipelined step: all of it, the part in which the slowest rank idles for want of input, and what hops add."""

    seconds: Floats
    bubble: Floats
    hops: Floats


def span(
    schedule: Number, pp: Number, chunks: Number, num_microbatches: Number, first: Seconds, middle: Seconds,
    last: Seconds, hop: Number, *, steps_overlap: bool = False,
) -> Span:  # fmt: skip
    """Seconds of a step over `pp` stages, all but the ends alike; `hop` is one transfer between ranks.

    Where steps overlap, a step is as long as the busiest rank is busy, from its first forward on.
    """
    code = np.asarray(schedule)
    p, v, m = (np.asarray(each, dtype=np.float64) for each in (pp, chunks, num_microbatches))
    slowest = np.where(p > 1, np.maximum(np.maximum(first.total, middle.total), last.total), first.total)
    others = np.maximum(p - 2, 0.0)
    through = np.where(p > 1, first.total + others * middle.total + last.total, first.total)
    work = m * slowest
    ramp = through - slowest
    # Warm-up and cool-down of one whole backward; V schedules' leftovers in facts 1.3, for tF = tI = tW.
    t_forward, t_input, t_weight = middle
    shape = np.maximum(t_forward + t_input - t_weight, 0.0) / np.maximum(t_forward + t_input + t_weight, 1e-12)
    # With fewer microbatches than ranks, a round over the ranks is not full.
    missing = np.maximum(p - m, 0.0) * slowest * (1.0 - 1.0 / v)
    ideal = {
        "1f1b": ramp,
        "gpipe": ramp,
        "interleaved": ramp / v + missing,
        "looped-bfs": ramp / v + missing,
        "zb-h1": ramp * shape,
        "zb-h2": ramp * (0.0 if steps_overlap else shape),
        "zb-v": ramp * 0.2,
        "v-half": ramp / 2,
        "v-min": ramp * 2 / 3,
        "dualpipe": ramp / 3,
        "dualpipe-v": ramp / 3,
        "eager-1f1b": ramp,
        # Units of p microbatches, which do not quite close up behind each other.
        "chimera": ramp * (p / 2 - 1) / np.maximum(p - 1, 1) * np.maximum(0.85 * m / p, 1.0),
        # v / 2 waves: bubble / step is (2p - 2) / (3pw + p - 1) for m = p and a backward of two forwards.
        "hanayo": ramp * 2 * p / np.maximum(1.5 * p * v - p + 1, 1) + (-m % p) * slowest / 2,
    }
    # Hops that are not hidden: 1F1B waits for two with every microbatch (facts 1.2). What is not named: there and back.
    each = {
        "1f1b": (p - 1) + (m - 1) * (p - 1) / p,
        "gpipe": p - 1,
        "interleaved": p * v - 1,
        "looped-bfs": p - 1,
        "eager-1f1b": p - 1,
        "hanayo": p * v - 1,
    }
    bubble = np.choose(code, [np.broadcast_to(ideal[name], work.shape) for name in SCHEDULES])
    # No step is shorter than one microbatch's way there and back. Where the backward is split, the way has no weight
    # gradients on it, and few microbatches leave nothing else to do meanwhile (facts 1.1: m <= p).
    few = (m + p - 1) * (t_forward + t_input) + t_weight
    least = np.where(np.isin(code, SPLITS_BACKWARD), np.where(m <= p, few, 0.0), through)
    bubble = np.maximum(bubble, least - work)
    waits = [np.broadcast_to(each.get(name, 2 * (p - 1)), work.shape) for name in SCHEDULES]
    hops = np.asarray(2 * hop * np.choose(code, waits), dtype=np.float64)
    return Span(work + bubble + hops, bubble, hops)
