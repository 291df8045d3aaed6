"""Which units go where: so that no place holds more than it has room for, and the slowest is as fast as it can be."""

from collections.abc import Sequence

from shardwise.errors import ShardwiseError
from shardwise.placing.activation_share import ActivationShare, hosted_bytes, window_bytes
from shardwise.placing.loads import Load, total_bytes
from shardwise.placing.places import Place
from shardwise.units import format_bytes

_NEVER = float("inf")


class NoRoomError(ShardwiseError):
    """What is to be placed has no room where it was to go. There may be another way."""


def lay_out(
    loads: Sequence[Load],
    places: Sequence[Place],
    ranks: Sequence[int],
    *,
    num_in_flight: int,
    inseparable: Sequence[tuple[int, int]] = (),
    share: ActivationShare | None = None,
) -> list[range]:
    """The units of each stage, one run after the other. Stage i is on place `ranks[i]`.

    A place with several stages gives each of them an equal part of its room and of its time. With `share` activations
    may be on the host.
    """
    sharing = [ranks.count(rank) for rank in ranks]
    count, num_stages = len(loads), len(ranks)
    may_cut = [not any(first < at <= last for first, last in inseparable) for at in range(count + 1)]
    best: list[float] = [0.0] + [_NEVER] * count
    back: list[list[int]] = []
    for stage, rank in enumerate(ranks):
        place, num_sharing = places[rank], sharing[stage]
        after, choice = [_NEVER] * (count + 1), [0] * (count + 1)
        for first in range(stage, count):
            if best[first] == _NEVER or not may_cut[first]:
                continue
            for end in range(first + 1, count - (num_stages - stage - 1) + 1):
                if (
                    _least_bytes(loads[first:end], num_in_flight, place, num_sharing, share)
                    > place.room_bytes / num_sharing
                ):
                    break
                seconds = max(best[first], sum(load.cost for load in loads[first:end]) * num_sharing / place.speed)
                if may_cut[end] and seconds < after[end]:
                    after[end], choice[end] = seconds, first
        best = after
        back.append(choice)
    if best[count] == _NEVER:
        raise no_room(loads, places, ranks, num_in_flight=num_in_flight, share=share)
    stages: list[range] = []
    end = count
    for choice in reversed(back):
        stages.append(range(choice[end], end))
        end = choice[end]
    return stages[::-1]


def fits(
    stages: Sequence[Sequence[Load]],
    places: Sequence[Place],
    ranks: Sequence[int],
    *,
    num_in_flight: int,
    share: ActivationShare | None = None,
) -> bool:
    """Whether the units of every stage have room where they are."""
    return all(
        _least_bytes(each, num_in_flight, place, 1, share) <= place.room_bytes
        for place, each in zip(places, by_rank(stages, ranks, len(places)), strict=True)
    )


def by_rank(stages: Sequence[Sequence[Load]], ranks: Sequence[int], num_places: int) -> list[list[Load]]:
    """The units of each place, of all of its stages."""
    return [
        [load for stage, on in zip(stages, ranks, strict=True) if on == rank for load in stage]
        for rank in range(num_places)
    ]


def _least_bytes(
    loads: Sequence[Load], num_in_flight: int, place: Place, num_sharing: int, share: ActivationShare | None
) -> float:
    if share is None:
        return total_bytes(loads, num_in_flight)
    return share.least_bytes(loads, num_in_flight, window_bytes(place) / num_sharing)


def no_room(
    loads: Sequence[Load],
    places: Sequence[Place],
    ranks: Sequence[int],
    *,
    num_in_flight: int,
    share: ActivationShare | None = None,
) -> NoRoomError:
    """What is needed, and what there is, place by place."""
    needed = total_bytes(loads, num_in_flight)
    activations = num_in_flight * sum(load.kept_bytes for load in loads)
    largest = max(loads, key=lambda load: total_bytes([load], num_in_flight))
    there = ", ".join(f"{place.name} has room for {format_bytes(place.room_bytes)}" for place in places)
    with_chunks = len(ranks) > len(places)
    on_host = ""
    if share is not None:
        part = 1.0 if share.part is None else share.part
        on_host = f", of which {format_bytes(hosted_bytes(part, loads, num_in_flight))} may be on the host"
    return NoRoomError(
        f"no room: the module needs {format_bytes(needed)} ({format_bytes(activations)} of it activations of"
        f" {num_in_flight} microbatches{on_host}; the largest unit, {largest.unit}, needs"
        f" {format_bytes(total_bytes([largest], num_in_flight))}); {there}",
        remedy="another device, a larger budget, a smaller batch"
        + (", or a schedule with one stage a place" if with_chunks else ""),
    )
