"""One layout simulated on its schedule, stage by stage, with uneven layers and hops, which closed forms approximate."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from shardwise.cost.layouts import Layouts
from shardwise.cost.stage import Pieces, Pricer, Work, add
from shardwise.cost.step import as_stage, hop_seconds
from shardwise.schedule.catalogue import CATALOGUE, make_schedule
from shardwise.schedule.makespan import makespan
from shardwise.schedule.prices import StageTimes
from shardwise.schedule.schedule import Schedule

# A long step is periodic: a step of this many microbatches per rank is simulated, and another with one round more.
_ROUNDS = 3
# In these schedules ranks reach their peak of memory sooner: after this many microbatches per rank and a few more. This
# is sufficient for schedules that are not simulated.
_FULL_AFTER = {"1f1b": 1, "zb-h1": 1, "v-half": 1, "v-min": 1, "zb-h2": 2, "zb-v": 2}
_A_FEW = 2
# More forwards than this take too long to simulate in an interactive command.
_MOST_FORWARDS = 8000


class Played(NamedTuple):
    """Seconds of all microbatches, and the seconds of the busiest rank's own work among them."""

    seconds: float
    work: float


def share_layers(num_layers: int, ranks: Sequence[int], begin: float, end: float) -> tuple[int, ...]:
    """Return the layers of each stage, at least one, that balance the ranks. `begin`, `end`: weight of embedding, head.

    `ranks` is the rank of each stage. A rank's layers are distributed evenly over its stages.
    """
    stages = {rank: [stage for stage, on in enumerate(ranks) if on == rank] for rank in dict.fromkeys(ranks)}
    share = (num_layers + begin + end) / len(stages)
    ideal = {
        rank: max(share - begin * (0 in own) - end * (len(ranks) - 1 in own), float(len(own)))
        for rank, own in stages.items()
    }
    counts = _whole(ideal, num_layers, {rank: len(own) for rank, own in stages.items()})
    layers = [0] * len(ranks)
    for rank, own in stages.items():
        each, more = divmod(counts[rank], len(own))
        for place, stage in enumerate(own):
            layers[stage] = each + (place < more)
    return tuple(layers)


def _whole(ideal: dict[int, float], total: int, least: dict[int, int]) -> dict[int, int]:
    """Return integers with a given sum, each as near its ideal as possible and at least its minimum."""
    counts = {rank: max(int(value), least[rank]) for rank, value in ideal.items()}
    while sum(counts.values()) < total:
        # Ties go to the later rank: ranks at the end of a pipeline hold fewer microbatches.
        counts[max(counts, key=lambda rank: (round(ideal[rank] - counts[rank], 9), rank))] += 1
    while sum(counts.values()) > total:
        free = [rank for rank in counts if counts[rank] > least[rank]]
        counts[min(free, key=lambda rank: (round(ideal[rank] - counts[rank], 9), rank))] -= 1
    return counts


def end_weights(pieces: Pieces, num_layers: int, counts: Sequence[int]) -> tuple[float, float]:
    """Return the weights of embedding and head, in layers."""
    layer = sum(float(work.total[0]) * count for work, count in zip(pieces.kinds, counts, strict=True)) / num_layers
    return float(pieces.begin.total[0]) / layer, float(pieces.end.total[0]) / layer


def short_schedule(name: str, num_ranks: int, num_microbatches: int, chunks: int | None, *, more: int = 0) -> Schedule:
    """Return the schedule of a step, or of a shorter one that also reaches the steady state."""
    short = (_ROUNDS + more) * num_ranks + num_microbatches % num_ranks
    if name in _FULL_AFTER and not _is_played(num_ranks, num_microbatches, chunks or CATALOGUE[name].chunks):
        short = _FULL_AFTER[name] * num_ranks + _A_FEW
    return _schedule(name, num_ranks, min(num_microbatches, short), chunks)


def _is_played(num_ranks: int, num_microbatches: int, chunks: int) -> bool:
    """Return whether a schedule is short enough to be simulated."""
    return num_ranks * chunks * min(num_microbatches, (_ROUNDS + 2) * num_ranks) <= _MOST_FORWARDS


@lru_cache(maxsize=32)
def _schedule(name: str, num_ranks: int, num_microbatches: int, chunks: int | None) -> Schedule:
    return make_schedule(name, num_ranks, num_microbatches, chunks)


def play(
    pricer: Pricer, layouts: Layouts, name: str, chunks: int | None, stage_layers: Sequence[int], pieces: Pieces
) -> Played | None:
    """Simulate the only layout in `layouts`, with its `pieces`. Return None if that would take too long."""
    num_ranks, num_microbatches = int(layouts.pp[0]), int(layouts.num_microbatches[0])
    if not _is_played(num_ranks, num_microbatches, len(stage_layers) // num_ranks):
        return None
    works = _stage_works(pricer, pieces, stage_layers)
    times = [_times(work) for work in works]
    if CATALOGUE[name].splits_backward:
        times = _in_halves(times, [float(work.halves[0]) for work in works])
    hop = float(hop_seconds(pricer, layouts)[0])
    first = short_schedule(name, num_ranks, num_microbatches, chunks)
    placement = first.placement
    ranks = [sum(times[stage % len(times)].total for stage in stages) for stages in placement.stages]
    busiest = max(ranks) / len(placement.pipes)
    seconds = _makespan(first, times, hop)
    left = num_microbatches - first.num_microbatches
    if left > 0:
        longer = short_schedule(name, num_ranks, num_microbatches, chunks, more=1)
        more = longer.num_microbatches - first.num_microbatches
        # The busiest rank may still catch up in the round that is added. In later ones it cannot.
        seconds += left * max((_makespan(longer, times, hop) - seconds) / more, busiest)
    return Played(seconds, busiest * num_microbatches)


def _stage_works(pricer: Pricer, pieces: Pieces, stage_layers: Sequence[int]) -> list[Work]:
    order = [pieces.kinds[kind] for kind in pricer.model.layer_order]
    works, begin = [], 0
    for stage, number in enumerate(stage_layers):
        own = order[begin : begin + number]
        own += [pieces.begin] if stage == 0 else []
        own += [pieces.end] if stage == len(stage_layers) - 1 else []
        works.append(add(*own))
        begin += number
    return works


def _times(work: Work) -> StageTimes:
    forward, inputs, weights = (float(each[0]) for each in as_stage(work))
    return StageTimes(forward=forward, input_gradient=inputs, weight_gradient=weights)


def _in_halves(times: Sequence[StageTimes], additional: Sequence[float]) -> list[StageTimes]:
    """Return the times with backwards in two halves, which take longer where that was measured. The halves share the
    additional time like the time of a whole backward.

    No rank waits for gradients of the first stage's inputs, so its backward stays whole, in the second half
    (`execution/backward.py`)."""
    if not any(additional):
        return list(times)  # On GPUs, what was fitted has halves on the first stage too.
    first, *others = times
    split = [StageTimes(forward=first.forward, input_gradient=0.0, weight_gradient=first.backward)]
    for each, seconds in zip(others, additional[1:], strict=True):
        longer = 1.0 + seconds / each.backward
        split.append(
            StageTimes(
                forward=each.forward,
                input_gradient=longer * each.input_gradient,
                weight_gradient=longer * each.weight_gradient,
            )
        )
    return split


def _makespan(schedule: Schedule, times: Sequence[StageTimes], hop: float) -> float:
    num_stages = schedule.placement.num_stages
    seconds = {
        (kind, stage): taken
        for stage in range(num_stages)
        for kind, taken in times[stage % len(times)].by_kind.items()
    }  # fmt: skip
    return makespan(schedule, seconds, hop)
