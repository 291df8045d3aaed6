"""Where ranks stand, as each reports to the others; and which rank stalls them."""

import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.ranks.rank_error import RankError
from shardwise.torch_private import Store

# GPUs that wait for each other while no other rank is late may also have a long computation at one instruction.
_LONGER_ON_GPUS = 3
# A collective that all ranks have reached may have much to send.
_LONGER_TOGETHER = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLocation:
    """The position of a rank: since when, for which ranks it waits, and for how long it has been silent.

    It waits for one rank to send or to receive, or for several to reach the same collective.
    """

    rank: int
    at: str
    at_seconds: float = 0.0
    silent_seconds: float = 0.0
    waits_for: tuple[int, ...] = ()
    on_gpu: bool = False

    def __str__(self) -> str:
        if self.on_gpu:
            return f"rank {self.rank} waits on its GPU at {self.at} ({self.at_seconds:.0f} s)"
        if self.waits_for:
            return f"rank {self.rank} waits for {_ranks(self.waits_for)} at {self.at} ({self.at_seconds:.0f} s)"
        return f"rank {self.rank} was last at {self.at} ({self.at_seconds:.0f} s)"


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def find_stall(
    places: Sequence[RankLocation], me: int, limit_seconds: float, patience: float = 1.0
) -> RankError | None:
    """Name the rank that stalls rank `me`, if any: follow the chain of waits to one that has not moved for too long,
    which is `patience` times the limit."""
    most, remedy = patience * limit_seconds, f"limit_seconds={3 * limit_seconds:g}"
    found = _find_late(places, me, most) or _find_circle(places, [me], most)
    if found is None:
        return _find_together(places, places[me], most, remedy)
    culprit, problem = found
    return RankError(
        "\n  ".join([problem, *map(str, places)]),
        remedy=f"{remedy}, if rank {culprit} is only slow",
        rank=culprit,
    )


def _find_late(places: Sequence[RankLocation], me: int, limit_seconds: float) -> tuple[int, str] | None:
    """Find the first rank that `me` waits for, directly or through others, that is silent or does not move."""
    seen, chain = {me}, deque([me])
    while chain:
        place = places[chain.popleft()]
        if place.silent_seconds >= limit_seconds:
            return place.rank, _silence_of(place)
        # It is unknown whether a silent rank has moved since.
        if not place.waits_for and place.at_seconds - place.silent_seconds >= limit_seconds:
            # It may stand there because of another rank that is stopped. That rank is named as soon as it is known.
            quiet = max(places, key=lambda each: each.silent_seconds)
            if quiet.silent_seconds >= limit_seconds / 2:
                return (quiet.rank, _silence_of(quiet)) if quiet.silent_seconds >= limit_seconds else None
            return place.rank, f"rank {place.rank} has been at {place.at} for {place.at_seconds:.0f} s"
        found = [other for other in _awaited(places, place) if other not in seen]
        seen.update(found)
        chain.extend(found)
    return None


def _find_circle(places: Sequence[RankLocation], chain: list[int], limit_seconds: float) -> tuple[int, str] | None:
    """Find ranks that wait for each other, all of them for too long. Each rank in `chain` waits for the next."""
    place = places[chain[-1]]
    if place.at_seconds < limit_seconds * (_LONGER_ON_GPUS if place.on_gpu else 1):
        return None
    awaited = _awaited(places, place)
    for other in awaited:
        if other in chain:
            circle = sorted(chain[chain.index(other) :])
            quiet = max((places[rank] for rank in circle), key=lambda each: each.silent_seconds)
            if quiet.silent_seconds >= limit_seconds / 2:
                # It was stopped while it waited, so it still reports a wait. Its silence counts from the first look.
                return quiet.rank, _silence_of(quiet)
            shortest = min(places[rank].at_seconds for rank in circle)
            return other, f"{_ranks(circle)} have waited for each other for {shortest:.0f} s"
    return next((found for other in awaited if (found := _find_circle(places, [*chain, other], limit_seconds))), None)


def _find_together(
    places: Sequence[RankLocation], mine: RankLocation, limit_seconds: float, remedy: str
) -> RankError | None:
    """Find ranks that are all in one collective that does not end. None of them is late, so none is named."""
    all_of_them = sorted({mine.rank, *mine.waits_for})
    together = [places[rank] for rank in all_of_them]
    shortest = min(each.at_seconds for each in together)
    is_one_place = all(each.at == mine.at and each.waits_for and not each.on_gpu for each in together)
    if len(together) < 3 or not is_one_place or shortest < _LONGER_TOGETHER * limit_seconds:
        return None
    return RankError(
        "\n  ".join(
            [
                f"{_ranks(all_of_them)} have all been at {mine.at} for {shortest:.0f} s, each waiting for what the"
                " others send there: no rank is late, so it is lost on its way, or one has come there another time than"
                " the others",
                *map(str, places),
            ]
        ),
        remedy="the same calls of the engine on every rank, as many of each; NCCL_DEBUG=INFO, or"
        f" TORCH_CPP_LOG_LEVEL=INFO for gloo, says what a network does; {remedy}, if it is only slow",
    )


def _silence_of(place: RankLocation) -> str:
    return f"rank {place.rank} has not answered for {place.silent_seconds:.0f} s; it was last at {place.at}"


def _awaited(places: Sequence[RankLocation], place: RankLocation) -> list[int]:
    """Whom a rank waits for. Of a collective, those that have not come to it too: a rank that stands there and waits
    for nobody has left the one before."""
    if place.on_gpu or len(place.waits_for) == 1:
        return list(place.waits_for)
    return [other for other in place.waits_for if places[other].at != place.at or not places[other].waits_for]


class Board:
    """The places of all ranks in the store. Clocks of machines differ, so only the reader's own clock is used:
    a rank has been silent since the reader last saw its place change, and a place changes with every beat."""

    def __init__(self, store: Store, name: str, rank: int, num_ranks: int) -> None:
        self._store, self._rank = store, rank
        self._keys = [f"{name}/place/{other}" for other in range(num_ranks)]
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._beats = 0
        self._moved = (-1, time.monotonic())

    def mine(self, place: object, moves: int, waits_for: tuple[int, ...]) -> RankLocation:
        now = time.monotonic()
        if moves != self._moved[0]:
            self._moved = (moves, now)
        return RankLocation(rank=self._rank, at=str(place), at_seconds=now - self._moved[1], waits_for=waits_for)

    def write(self, mine: RankLocation) -> None:
        self._beats += 1
        record = {
            "beat": self._beats,
            "at": mine.at,
            "at_seconds": mine.at_seconds,
            "waits_for": mine.waits_for,
            "on_gpu": mine.on_gpu,
        }
        self._store.set(self._keys[self._rank], json.dumps(record))

    def read(self, mine: RankLocation) -> list[RankLocation]:
        return [mine if rank == self._rank else self._read(rank) for rank in range(len(self._keys))]

    def _read(self, rank: int) -> RankLocation:
        now = time.monotonic()
        found = self._store.get(self._keys[rank]) if self._store.check([self._keys[rank]]) else b""
        if rank not in self._seen or self._seen[rank][0] != found:
            self._seen[rank] = (found, now)
        silent = now - self._seen[rank][1]
        if not found:
            return RankLocation(rank=rank, at="nothing yet", at_seconds=silent, silent_seconds=silent)
        record = json.loads(found)
        at_seconds, waits_for = record["at_seconds"] + silent, tuple(record["waits_for"])
        return RankLocation(
            rank=rank, at=record["at"], at_seconds=at_seconds, silent_seconds=silent, waits_for=waits_for,
            on_gpu=record["on_gpu"],
        )  # fmt: skip
