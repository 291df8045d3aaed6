"""The best cut is the best: compared with every cut there is."""

import random
from itertools import combinations

import pytest

from shardwise.stages.split.cut import best_cut


def every_cut(num_calls: int, num_stages: int) -> list[tuple[range, ...]]:
    return [
        tuple(range(first, end) for first, end in zip([0, *ends], [*ends, num_calls], strict=True))
        for ends in combinations(range(1, num_calls), num_stages - 1)
    ]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_no_cut_has_a_faster_slowest_stage(seed: int, num_stages: int) -> None:
    draw = random.Random(seed)
    costs = [draw.randint(1, 20) for _ in range(8)]
    speeds = [draw.choice([1.0, 2.0]) for _ in range(num_stages)]

    def times(cut: tuple[range, ...]) -> list[float]:
        return [sum(costs[call] for call in calls) / speed for calls, speed in zip(cut, speeds, strict=True)]

    found = times(best_cut(costs, num_stages, speeds=speeds))
    best = min(max(times(cut)) for cut in every_cut(8, num_stages))
    assert max(found) == best
    even = min(sum(each**2 for each in times(cut)) for cut in every_cut(8, num_stages) if max(times(cut)) == best)
    assert sum(each**2 for each in found) == pytest.approx(even)


def test_what_belongs_together_is_not_cut() -> None:
    assert best_cut([1.0] * 6, 2, inseparable=[(1, 3)]) == (range(4), range(4, 6))


def test_what_must_be_received_counts() -> None:
    # Without it the even cut is in the middle; there, a skip would have to be sent.
    assert best_cut([1.0] * 4, 2) == (range(2), range(2, 4))
    assert best_cut([1.0] * 4, 2, received=lambda first, _: 5.0 if first == 2 else 0.0) != (range(2), range(2, 4))
