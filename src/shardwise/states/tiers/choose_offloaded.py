"""Which blocks live on the host: the fewest that are enough, spread evenly among the others.

    8 blocks, 3 on the host        . . h . . h . h

Evenly, because the link then works while the blocks between are computed: two that follow each other would have to
come in under one of them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar


def spread(num_blocks: int, num_chosen: int) -> list[int]:
    """Choose so many of the blocks, as evenly as they go."""
    so_far = [number * num_chosen // num_blocks for number in range(num_blocks + 1)]
    return [number for number in range(num_blocks) if so_far[number + 1] > so_far[number]]


def choose_offloaded(num_blocks: int, are_enough: Callable[[list[int]], bool]) -> list[int] | None:
    """The fewest blocks, spread evenly, of which `are_enough` says so; None if not even all of them are."""
    for count in range(num_blocks + 1):
        chosen = spread(num_blocks, count) if count else []
        if are_enough(chosen):
            return chosen
    return None


def choose_for_room(sizes: Sequence[int], left: Sequence[int], room_bytes: int) -> list[int] | None:
    """The fewest that have to go so that the others fit; of one that goes something may be left."""

    def fits(chosen: list[int]) -> bool:
        gone = set(chosen)
        return sum(left[at] if at in gone else size for at, size in enumerate(sizes)) <= room_bytes

    return choose_offloaded(len(sizes), fits)


class _Sized(Protocol):
    """A weight, or several that go together."""

    @property
    def nbytes(self) -> int: ...


Weight = TypeVar("Weight", bound=_Sized)
Key = TypeVar("Key")


def choose_fraction(units: Mapping[str, Sequence[Weight]], fraction: float) -> list[Weight]:
    """The weights of so many units as have at least this part of all bytes. What several units have counts once."""
    every = list(units.values())
    least = fraction * sum(each.nbytes for each in {each for own in every for each in own})

    def weights(chosen: Iterable[int]) -> list[Weight]:
        return list(dict.fromkeys(each for number in chosen for each in every[number]))

    found = choose_offloaded(len(every), lambda chosen: sum(each.nbytes for each in weights(chosen)) >= least)
    return weights(found or ())


def choose_last(sizes: Mapping[Key, float], fraction: float, always: Iterable[Key] = ()) -> set[Key]:
    """At least this part of all bytes, and some always: what stays is of the first, as far as it fits.

    For state that comes once a step, after a backward: that of the first weights is needed last and used first.
    """
    left = (1 - fraction) * sum(sizes.values())
    found = {each for each in always if each in sizes}
    for key, size in sizes.items():
        if key in found:
            continue
        if fraction < 1 and size <= left:
            left -= size
        else:
            found.add(key)
    return found
