"""Count rejected candidates by reason, so that an answer can say what was not chosen."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from shardwise.cost.memory import StepBytes
from shardwise.cost.places import PLACES


@dataclass(slots=True)
class Tally:
    """Counts of candidates. One that is rejected early counts with all choices that were still open below it.

    `refused` is by reason: `divisibility`, `topology`, `model` (layers that cannot be sharded) and `engines` (what the
    engine does not run). `memory` is by the place of the fullest rank and its largest part. `slower` were shown by a
    bound to be slower than a known candidate; `priced` were priced in full.
    """

    refused: Counter[str] = field(default_factory=Counter)
    memory: Counter[tuple[str, str]] = field(default_factory=Counter)
    slower: int = 0
    priced: int = 0
    fitting: int = 0

    @property
    def considered(self) -> int:
        """All candidates."""
        return sum(self.refused.values()) + sum(self.memory.values()) + self.slower + self.fitting

    def add_memory(self, held: StepBytes, fallen: np.ndarray, counts: np.ndarray) -> None:
        """Count rejected candidates, weighted by `counts`, by their fullest place and its largest part."""
        if not fallen.any():
            return
        names, rows = list(held.parts), np.flatnonzero(fallen)
        by_place = held.by_place
        place = by_place[rows].argmax(axis=1)
        # One combined index for row and place is faster than two.
        cells = rows * by_place.shape[1] + place
        part = np.stack([np.broadcast_to(held.parts[name], by_place.shape).ravel()[cells] for name in names])
        part = part.argmax(axis=0)
        for code, count in _sums(place * len(names) + part, counts[fallen]).items():
            self.memory[PLACES[code // len(names)], names[code % len(names)]] += count


def _sums(codes: np.ndarray, counts: np.ndarray) -> dict[int, int]:
    values, inverse = np.unique(codes, return_inverse=True)
    totals = np.bincount(inverse, weights=counts)
    return {int(value): int(total) for value, total in zip(values, totals, strict=True)}
