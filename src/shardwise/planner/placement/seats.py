"""A placement as a value: the device of each rank, the traffic of every link, and the gain over the plain order."""

from dataclasses import dataclass

import numpy as np

from shardwise.planner.placement.search import EXACT, search, seconds_of
from shardwise.planner.placement.traffic import Edges, edges_of, step_bytes_of
from shardwise.planner.placement.ways import Ways, ways_of
from shardwise.planner.plan import Plan
from shardwise.planner.question import Question
from shardwise.units import format_percent, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """The traffic from one device to another in a step, by axis, and the time of the longest of it."""

    sender: int
    receiver: int
    num_bytes: dict[str, float]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Seats:
    """The device of each rank, and the communication time of a step, here and in the plain order."""

    devices: tuple[int, ...]
    domains: tuple[int, ...]
    seconds: float
    plain_seconds: float
    uses: tuple[LinkUse, ...]
    is_exact: bool

    @property
    def is_plain(self) -> bool:
        return self.devices == tuple(range(len(self.devices)))

    def __str__(self) -> str:
        if self.is_plain:
            return "ranks sit in plain order: no other is better"
        gain = format_percent(1 - self.seconds / self.plain_seconds, decimals=0)
        return (
            f"ranks sit where messages of a step take {format_seconds(self.seconds)}, {gain} less than the"
            f" {format_seconds(self.plain_seconds)} of the plain order"
        )


def seats_for(question: Question, plan: Plan) -> Seats:
    """Return the placement of a plan on its cluster, which `train` and launchers use."""
    return take_seats(plan, step_bytes_of(question, plan), ways_of(question.cluster))


def take_seats(plan: Plan, num_bytes: dict[str, float], ways: Ways) -> Seats:
    """Return the placement of a plan, given the bytes on an edge of each axis."""
    edges = edges_of(plan, num_bytes)
    devices = search(plan, edges, ways)
    plain = np.arange(plan.num_ranks)
    return Seats(
        devices=tuple(map(int, devices)),
        domains=tuple(map(int, ways.domain)),
        seconds=seconds_of(edges, ways, devices) if edges else 0.0,
        plain_seconds=seconds_of(edges, ways, plain) if edges else 0.0,
        uses=_uses(edges, ways, devices) if plan.num_ranks <= _MOST_DRAWN else (),
        is_exact=plan.num_ranks <= EXACT,
    )


#: The links of up to this many ranks are listed one by one.
_MOST_DRAWN = 64


def _uses(edges: list[Edges], ways: Ways, devices: np.ndarray) -> tuple[LinkUse, ...]:
    """Return every used link, the slowest first."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    for each in edges:
        for a, b in zip(devices[each.senders].tolist(), devices[each.receivers].tolist(), strict=True):
            mine = found.setdefault((a, b), {})
            mine[each.axis] = mine.get(each.axis, 0.0) + each.num_bytes
    uses = []
    for (a, b), num_bytes in found.items():
        slow = float(ways.seconds(np.array([a]), np.array([b]))[0])
        uses.append(LinkUse(sender=a, receiver=b, num_bytes=num_bytes, seconds=slow * max(num_bytes.values())))
    return tuple(sorted(uses, key=lambda use: -use.seconds))
