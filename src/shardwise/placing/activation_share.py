"""How much of its activations a place sends to the host: a part that is given, or the least that makes room.

    at a place    weights and all that training adds | what stays of activations | on its way | one unit at work
    on the host                                        what does not stay

What is on its way, out in a forward and back ahead of a backward, has a window. Pieces that are too small to be sent
stay, and so does what a stage was given by the stage before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.cost.memory import DEFERRED_FREE_BYTES
from shardwise.placing.loads import Load, total_bytes
from shardwise.placing.places import Place

#: Of a small place's room, what the window may take.
_WINDOW = 1 / 12


def window_bytes(place: Place) -> int:
    """What may be between a place and the host at once."""
    return min(DEFERRED_FREE_BYTES, int(place.room_bytes * _WINDOW))


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationShare:
    """Activations may go to the host: this part of them, or, without one, what there is no room for."""

    part: float | None = None

    def least_bytes(self, loads: Sequence[Load], num_in_flight: int, window: float) -> float:
        """What these units need of their place at the least, with so much on its way."""
        if self.part is not None:
            return bytes_with(self.part, loads, num_in_flight, window)
        return min(bytes_with(part, loads, num_in_flight, window) for part in (0.0, 1.0))

    def find_part(self, loads: Sequence[Load], num_in_flight: int, place: Place) -> float | None:
        """The part of a place's activations that goes, in hundredths; None if there is no room even so."""
        parts = [hundredth / 100 for hundredth in range(101)] if self.part is None else [self.part]
        window = window_bytes(place)
        fitting = (part for part in parts if bytes_with(part, loads, num_in_flight, window) <= place.room_bytes)
        return next(fitting, None)


def bytes_with(part: float, loads: Sequence[Load], num_in_flight: int, window: float) -> float:
    """What units need of their place with a part of their activations on the host."""
    hosted = hosted_bytes(part, loads, num_in_flight)
    at_work = max((load.kept_bytes for load in loads), default=0)
    return total_bytes(loads, num_in_flight) - hosted + min(hosted, window + at_work)


def hosted_bytes(part: float, loads: Sequence[Load], num_in_flight: int) -> float:
    """What of the activations is on the host then."""
    stays = sum(load.small_bytes for load in loads)
    if num_in_flight > 1 and loads:
        stays += loads[0].given_bytes
    return part * num_in_flight * max(0, sum(load.kept_bytes for load in loads) - stays)
