"""Links between places: how long a copy takes, and which links it passes.

Devices reach each other and the host directly. A disk is reached through the host.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.dataflow.place import Kind, Place
from shardwise.errors import ShardwiseError

#: Bytes to a pair of places, by their indices.
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The time of a copy: a latency, then its bytes at a rate."""

    latency_seconds: float = 0.0
    bytes_per_second: float

    def __post_init__(self) -> None:
        if not self.latency_seconds >= 0.0 or not self.bytes_per_second > 0.0:
            raise ShardwiseError(
                f"a link of {self.latency_seconds} s and {self.bytes_per_second} bytes/s is none",
                remedy="Link(latency_seconds=1e-5, bytes_per_second=50e9)",
            )

    def seconds(self, num_bytes: int) -> float:
        """Return the seconds from the start of a copy to its end."""
        return self.latency_seconds + num_bytes / self.bytes_per_second


#: One link for all pairs, or each link by the names of its ends.
GivenLinks = Link | Mapping[tuple[str, str], Link]

# Relative distances where no link was measured or given. Only their order matters.
_NOMINAL = {Kind.GPU: 1.0, Kind.CPU: 1.0, Kind.HOST: 2.0, Kind.DISK: 100.0}


class Routes:
    """Finds the links that a copy passes, and the nearest source."""

    def __init__(self, places: Sequence[Place], given: GivenLinks | None) -> None:
        self._host = next(place for place in places if place.kind is Kind.HOST)
        self.links: dict[Pair, Link] = {} if given is None else _read(places, given)

    def hops(self, source: Place, target: Place) -> list[tuple[Place, Place]]:
        """Return the links from one place to another, in order."""
        if _are_linked(source, target):
            return [(source, target)]
        return [(source, self._host), (self._host, target)]

    def seconds(self, source: Place, target: Place, num_bytes: int) -> float:
        """Return the seconds of a copy or, where a link is unknown, a number that orders sources by distance."""
        return sum(self._seconds_of(*hop, num_bytes) for hop in self.hops(source, target))

    def _seconds_of(self, source: Place, target: Place, num_bytes: int) -> float:
        link = self.links.get((source.index, target.index))
        if link is None:
            return max(_NOMINAL[source.kind], _NOMINAL[target.kind])
        return link.seconds(num_bytes)


def linked_pairs(places: Sequence[Place]) -> list[tuple[Place, Place]]:
    """Return all directly linked pairs, each direction separately."""
    return [(one, other) for one in places for other in places if one is not other and _are_linked(one, other)]


def _are_linked(source: Place, target: Place) -> bool:
    kinds = {source.kind, target.kind}
    return Kind.DISK not in kinds or Kind.HOST in kinds


def _read(places: Sequence[Place], given: GivenLinks) -> dict[Pair, Link]:
    pairs = linked_pairs(places)
    if isinstance(given, Link):
        return {(one.index, other.index): given for one, other in pairs}
    known = {place.name for place in places}
    for ends in given:
        for name in ends:
            if name not in known:
                raise ShardwiseError(f"a link leads to {name}, which is not a place", remedy=", ".join(sorted(known)))
    found = {}
    for one, other in pairs:
        link = given.get((one.name, other.name)) or given.get((other.name, one.name))
        if link is None:
            raise ShardwiseError(
                f"no link between {one} and {other} was given, but others were",
                remedy=f'links={{("{one}", "{other}"): Link(bytes_per_second=50e9), ...}}',
            )
        found[one.index, other.index] = link
    return found
