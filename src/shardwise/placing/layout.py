"""Assign units to places so that no place exceeds its memory, and the slowest place is as fast as possible.

A place may offload a part of its activations to the host: a given part, or (None) the least that makes them fit.

    at a place    weights and all that training adds | what stays of activations | on its way | one unit at work
    on the host                                        what does not stay

Activations in transit, out in a forward and back ahead of a backward, occupy a window. Tensors that are too small to be
sent stay, and so do a stage's inputs from the stage before it.
"""

from collections.abc import Sequence

from shardwise.cost.memory import DEFERRED_FREE_BYTES
from shardwise.errors import ShardwiseError
from shardwise.placing.loads import Load, total_bytes
from shardwise.placing.places import Place
from shardwise.units import format_bytes

#: Of a small place's room, what the window may take.
_WINDOW = 1 / 12


class NoRoomError(ShardwiseError):
    """A module does not fit in the tried way. Another way may exist."""


def window_bytes(place: Place) -> int:
    """Return the bytes that may be in transit between a place and the host at once."""
    return min(DEFERRED_FREE_BYTES, int(place.room_bytes * _WINDOW))


def offloaded_bytes(part: float, loads: Sequence[Load], num_in_flight: int) -> float:
    """Return the bytes on the host with a share of the activations there."""
    stays = sum(load.small_bytes for load in loads)
    if num_in_flight > 1 and loads:
        stays += loads[0].given_bytes
    return part * num_in_flight * max(0, sum(load.kept_bytes for load in loads) - stays)


def bytes_with(part: float, loads: Sequence[Load], num_in_flight: int, window: float) -> float:
    """Return the memory that units need at their place with a share of activations on the host, and some in transit."""
    if not part:
        return total_bytes(loads, num_in_flight)
    offloaded = offloaded_bytes(part, loads, num_in_flight)
    at_work = max((load.kept_bytes for load in loads), default=0)
    return total_bytes(loads, num_in_flight) - offloaded + min(offloaded, window + at_work)


def least_bytes(part: float | None, loads: Sequence[Load], num_in_flight: int, window: float) -> float:
    """Return the least memory that units need at their place."""
    parts = (0.0, 1.0) if part is None else (part,)
    return min(bytes_with(each, loads, num_in_flight, window) for each in parts)


def find_part(part: float | None, loads: Sequence[Load], num_in_flight: int, place: Place) -> float | None:
    """Return the share of a place's activations to offload, in hundredths; None if even that does not fit."""
    parts = [hundredth / 100 for hundredth in range(101)] if part is None else [part]
    window = window_bytes(place)
    fitting = (each for each in parts if bytes_with(each, loads, num_in_flight, window) <= place.room_bytes)
    return next(fitting, None)


def lay_out(
    loads: Sequence[Load],
    places: Sequence[Place],
    ranks: Sequence[int],
    *,
    num_in_flight: int,
    inseparable: Sequence[tuple[int, int]] = (),
    part: float | None = 0.0,
) -> list[range]:
    """Return the units of each stage, one run after the other. Stage i is on place `ranks[i]`.

    A place with several stages gives each of them an equal part of its room and of its time. `part` is what of the
    activations goes to the host.
    """
    count, num_stages = len(loads), len(ranks)
    may_cut = [not any(first < at <= last for first, last in inseparable) for at in range(count + 1)]
    # For each number of units that the stages until now have, how long the slowest takes, and which are whose.
    best: dict[int, tuple[float, list[range]]] = {0: (0.0, [])}
    for stage, rank in enumerate(ranks):
        place, num_sharing = places[rank], ranks.count(rank)
        room, window = place.room_bytes / num_sharing, window_bytes(place) / num_sharing
        after: dict[int, tuple[float, list[range]]] = {}
        for first in sorted(best):
            slowest, runs = best[first]
            for end in range(first + 1, count - (num_stages - stage - 1) + 1):
                some = loads[first:end]
                if least_bytes(part, some, num_in_flight, window) > room:
                    break
                seconds = max(slowest, sum(load.cost for load in some) * num_sharing / place.speed)
                if may_cut[end] and (end not in after or seconds < after[end][0]):
                    after[end] = seconds, [*runs, range(first, end)]
        best = after
    if count not in best:
        raise no_room(loads, places, ranks, num_in_flight=num_in_flight, part=part)
    return best[count][1]


def no_room(
    loads: Sequence[Load],
    places: Sequence[Place],
    ranks: Sequence[int],
    *,
    num_in_flight: int,
    part: float | None = 0.0,
) -> NoRoomError:
    """Describe the memory needed and available, place by place."""
    needed = total_bytes(loads, num_in_flight)
    activations = num_in_flight * sum(load.kept_bytes for load in loads)
    largest = max(loads, key=lambda load: total_bytes([load], num_in_flight))
    there = ", ".join(f"{place.name} has room for {format_bytes(place.room_bytes)}" for place in places)
    with_chunks = len(ranks) > len(places)
    on_host = ""
    if part != 0.0:
        offloaded = offloaded_bytes(1.0 if part is None else part, loads, num_in_flight)
        on_host = f", of which {format_bytes(offloaded)} may be on the host"
    return NoRoomError(
        f"no room: the module needs {format_bytes(needed)} ({format_bytes(activations)} of it activations of"
        f" {num_in_flight} microbatches{on_host}; the largest unit, {largest.unit}, needs"
        f" {format_bytes(total_bytes([largest], num_in_flight))}); {there}",
        remedy="another device, a larger budget, a smaller batch"
        + (", or a schedule with one stage a place" if with_chunks else ""),
    )
