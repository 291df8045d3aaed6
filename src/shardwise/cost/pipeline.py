"""Closed forms for the seconds of a pipelined step, from the seconds of one microbatch on each stage.

The forms are those of facts 1.1 and 1.2, which the simulator of `schedule/` reproduces; here they are evaluated for
many candidates at once. The first and last stages may differ (embedding, head). A microbatch passes every stage once,
and the slowest stage sets the pace.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from shardwise.cost.compute import Seconds
from shardwise.cost.numbers import Floats, Ints, Number
from shardwise.schedule.catalogue import CATALOGUE

SCHEDULES = (
    "1f1b", "gpipe", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe", "dualpipe-v",
    "eager-1f1b", "chimera", "hanayo",
)  # fmt: skip


#: Schedules whose backward has two halves, by index.
SPLITS_BACKWARD = [index for index, name in enumerate(SCHEDULES) if CATALOGUE[name].splits_backward]
# The schedule whose ranks never idle if steps overlap.
_WITHOUT_BUBBLE = SCHEDULES.index("zb-h2")


class Span(NamedTuple):
    """Seconds of a pipelined step: the total, the part in which the slowest rank waits for input, and that of hops."""

    seconds: Floats
    bubble: Floats
    hops: Floats


class _Pipes(NamedTuple):
    """Variables of the closed forms: ranks, chunks, microbatches; seconds of the slowest stage and of all others;
    `shape`: the share of a bubble that remains with a split backward; the three passes of a microbatch on a rank."""

    p: Floats
    v: Floats
    m: Floats
    slowest: Floats
    ramp: Floats
    shape: Floats
    forward: Floats
    input: Floats
    weight: Floats


# The formula of each schedule, evaluated for the candidates with this schedule.
Forms = Mapping[str, Callable[[_Pipes], Floats]]


def _looped(of: _Pipes) -> Floats:
    # With fewer microbatches than ranks, a round over the ranks is not full.
    return of.ramp / of.v + np.maximum(of.p - of.m, 0.0) * of.slowest * (1.0 - 1.0 / of.v)


def _lost_by_v_half(of: _Pipes) -> Floats:
    """Return the idle seconds per microbatch: the pattern has no gaps only if passes take about equally long."""
    return np.maximum(2 * np.maximum(of.forward, of.input) - of.forward - of.input - of.weight / 2, 0.0)


def _lost_by_v_min(of: _Pipes) -> Floats:
    """Return the same for a pattern in which each pass has a third of a microbatch."""
    return np.maximum(3 * np.maximum(of.forward, of.input) - of.forward - of.input - of.weight, 0.0)


# Bubbles: warm-up and cool-down (`ramp`). The remainders for V schedules are those of facts 1.3, for tF = tI = tW.
_IDEAL: Forms = {
    "1f1b": lambda of: of.ramp,
    "gpipe": lambda of: of.ramp,
    "interleaved": _looped,
    "looped-bfs": _looped,
    "zb-h1": lambda of: of.ramp * of.shape,
    "zb-h2": lambda of: of.ramp * of.shape,
    "zb-v": lambda of: of.ramp * 0.2,
    "v-half": lambda of: of.ramp / 2 + of.m * _lost_by_v_half(of),
    "v-min": lambda of: of.ramp * 2 / 3 + of.m * _lost_by_v_min(of),
    "dualpipe": lambda of: of.ramp / 3,
    "dualpipe-v": lambda of: of.ramp / 3,
    "eager-1f1b": lambda of: of.ramp,
    # Units of p microbatches, with small gaps between them.
    "chimera": lambda of: of.ramp * (of.p / 2 - 1) / np.maximum(of.p - 1, 1) * np.maximum(0.85 * of.m / of.p, 1.0),
    # v / 2 waves: bubble / step is (2p - 2) / (3pw + p - 1) for m = p and a backward of two forwards.
    "hanayo": lambda of: (
        of.ramp * 2 * of.p / np.maximum(1.5 * of.p * of.v - of.p + 1, 1) + (-of.m % of.p) * of.slowest / 2
    ),
}


def _there_and_back(of: _Pipes) -> Floats:
    return 2 * (of.p - 1)


# Exposed hops: 1F1B waits for two with every microbatch (facts 1.2).
_WAITS: Forms = {
    **dict.fromkeys(SCHEDULES, _there_and_back),
    "1f1b": lambda of: (of.p - 1) + (of.m - 1) * (of.p - 1) / of.p,
    "gpipe": lambda of: of.p - 1,
    "interleaved": lambda of: of.p * of.v - 1,
    "looped-bfs": lambda of: of.p - 1,
    "eager-1f1b": lambda of: of.p - 1,
    "hanayo": lambda of: of.p * of.v - 1,
}


def span(
    schedule: Number, pp: Number, chunks: Number, num_microbatches: Number, first: Seconds, middle: Seconds,
    last: Seconds, hop: Number, *, steps_overlap: bool = False,
) -> Span:  # fmt: skip
    """Return the seconds of a step over `pp` stages with equal middle stages. `hop` is one transfer between ranks.

    If steps overlap, a step takes as long as the busiest rank works, from its first forward on.
    """
    of, through = _pipes(pp, chunks, num_microbatches, first, middle, last)
    work = of.m * of.slowest
    code = np.broadcast_to(np.asarray(schedule), np.broadcast_shapes(np.shape(schedule), work.shape))
    bubble = by_schedule(code, _IDEAL, of)
    if steps_overlap:
        bubble = np.where(code == _WITHOUT_BUBBLE, 0.0, bubble)
    least = np.where(np.isin(code, SPLITS_BACKWARD), _least_split(of), through)
    bubble = np.maximum(bubble, least - work)
    hops = np.asarray(2 * hop * by_schedule(code, _WAITS, of), dtype=np.float64)
    return Span(work + bubble + hops, bubble, hops)


def spans(
    schedules: Ints, chunks: Ints, pp: Ints, num_microbatches: Ints, first: Seconds, middle: Seconds, last: Seconds,
    hop: Floats, *, steps_overlap: bool = False,
) -> Floats:  # fmt: skip
    """Return the seconds of the same candidates under each of several schedules: candidates x schedules."""
    of, through = _pipes(pp, 1, num_microbatches, first, middle, last)
    work, least_split = of.m * of.slowest, _least_split(of)
    found = np.empty((len(work), len(schedules)))
    for index, (code, number) in enumerate(zip(schedules, chunks, strict=True)):
        name, under = SCHEDULES[code], of._replace(v=np.array(number, dtype=np.float64))
        bubble = np.zeros(()) if steps_overlap and code == _WITHOUT_BUBBLE else _IDEAL[name](under)
        bubble = np.maximum(bubble, (least_split if code in SPLITS_BACKWARD else through) - work)
        found[:, index] = work + bubble + 2 * hop * _WAITS[name](under)
    return found


def _pipes(
    pp: Number, chunks: Number, num_microbatches: Number, first: Seconds, middle: Seconds, last: Seconds
) -> tuple[_Pipes, Floats]:
    """Return the variables of the closed forms, and the seconds of one microbatch through all stages and back."""
    p, v, m = (np.asarray(each, dtype=np.float64) for each in (pp, chunks, num_microbatches))
    slowest = np.where(p > 1, np.maximum(np.maximum(first.total, middle.total), last.total), first.total)
    through = np.where(p > 1, first.total + np.maximum(p - 2, 0.0) * middle.total + last.total, first.total)
    t_forward, t_input, t_weight = middle
    shape = np.maximum(t_forward + t_input - t_weight, 0.0) / np.maximum(t_forward + t_input + t_weight, 1e-12)
    of = np.broadcast_arrays(p, v, m, slowest, through - slowest, shape, t_forward, t_input, t_weight)
    return _Pipes(*of), through


def _least_split(of: _Pipes) -> Floats:
    """Return a lower bound of a step with split backward.

    No step is shorter than one microbatch's way through all stages and back. With a split backward, this way has no
    weight gradients, and with few microbatches there is no other work in the meantime (facts 1.1: m <= p).
    """
    few = (of.m + of.p - 1) * (of.forward + of.input) + of.weight
    return np.where(of.m <= of.p, few, 0.0)


_Of = TypeVar("_Of", bound="tuple[Any, ...]")


def by_schedule(code: Ints, forms: Mapping[str, Callable[[_Of], Floats]], of: _Of) -> Floats:
    """Evaluate the form of each candidate's own schedule. Most calls have few schedules, or one."""
    present = np.flatnonzero(np.bincount(code.ravel(), minlength=len(SCHEDULES)))
    if len(present) == 1:
        return np.broadcast_to(forms[SCHEDULES[present[0]]](of), code.shape)
    found = np.empty(code.shape)
    arrays = [np.broadcast_to(each, code.shape) for each in of]
    for each in present:
        rows = np.flatnonzero(code == each)
        found[rows] = forms[SCHEDULES[each]](type(of)(*(array[rows] for array in arrays)))
    return found
