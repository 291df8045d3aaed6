"""Alternative splits of the model into stages: the step time of each, and the bytes of the fullest rank."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from shardwise.explain.doctor.case import Case
from shardwise.schedule.replay import Replay, even_cut

#: What of a rank's bytes is the model's own, and goes where its units go.
STATE = ("parameters", "gradients", "optimizer")


class PricedCut(NamedTuple):
    """Units of each stage, the seconds of the step, and the bytes of the fullest rank (0 where none were counted)."""

    layers: tuple[int, ...]
    seconds: float
    fullest_bytes: float

    @property
    def plan(self) -> str:
        return "layers=" + "+".join(map(str, self.layers))


def other_cuts(case: Case) -> list[PricedCut]:
    """Return the most even cut, and all with one unit moved to the stage before or after; none if units are unknown."""
    layers, replay = case.layers, case.replay
    if layers is None or replay is None or not replay.units:
        return []
    costs = replay.unit_seconds
    cuts = dict.fromkeys([tuple(even_cut(costs, len(layers))), *_moves(layers)])
    return [_priced(case, cut, layers, replay, costs) for cut in cuts if cut != layers]


def _moves(layers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for source, units in enumerate(layers):
        for target in (source - 1, source + 1):
            if units > 1 and 0 <= target < len(layers):
                yield tuple(each - (at == source) + (at == target) for at, each in enumerate(layers))


def _priced(
    case: Case, cut: tuple[int, ...], layers: tuple[int, ...], replay: Replay, costs: Sequence[float]
) -> PricedCut:
    now, then = replay.stage_seconds, [sum(costs[unit] for unit in stage) for stage in _stages(cut)]
    factors = {stage: then[stage] / now[stage] for stage in range(len(cut)) if now[stage] > 0}
    return PricedCut(cut, replay.with_stages(factors), _fullest(case, cut, layers, replay))


def _fullest(case: Case, cut: Sequence[int], layers: Sequence[int], replay: Replay) -> float:
    """State goes with its units, and of activations each unit of a rank has as much."""
    if not case.held:
        return 0.0
    homes, stages = replay.schedule.placement.ranks, _stages(layers)
    weights = [unit.weight_bytes for stage in case.run.units for unit in stage] or [1.0] * sum(layers)
    after = [0.0] * len(replay.ranks)
    # For each unit: its part of its present rank's state, and of the rest.
    state, rest = [0.0] * sum(layers), [0.0] * sum(layers)
    for place, rank in enumerate(replay.ranks):
        mine = [unit for stage, home in enumerate(homes) if home == place for unit in stages[stage]]
        held = sum(case.held[rank].get(owner, 0.0) for owner in STATE)
        total = sum(weights[unit] for unit in mine)
        for unit in mine:
            state[unit] = held * (weights[unit] / total if total else 1 / len(mine))
            rest[unit] = (sum(case.held[rank].values()) - held) / len(mine)
    for stage, units in enumerate(_stages(cut)):
        after[homes[stage]] += sum(state[unit] + rest[unit] for unit in units)
    return max(after)


def _stages(cut: Sequence[int]) -> list[range]:
    ends = list(accumulate(cut))
    return [range(end - count, end) for end, count in zip(ends, cut, strict=True)]
