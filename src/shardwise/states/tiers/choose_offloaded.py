"""Choose the blocks that live on the host: the fewest that are enough, spread evenly among the others.

    8 blocks, 3 on the host        . . h . . h . h

Evenly, because the link is then busy while the blocks between are computed. Two adjacent blocks would have to be copied
during the computation of one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar


def spread(num_blocks: int, num_chosen: int) -> list[int]:
    """Choose this many of the blocks, as evenly as possible."""
    so_far = [number * num_chosen // num_blocks for number in range(num_blocks + 1)]
    return [number for number in range(num_blocks) if so_far[number + 1] > so_far[number]]


def choose_offloaded(num_blocks: int, are_enough: Callable[[list[int]], bool]) -> list[int] | None:
    """Return the fewest blocks, evenly spread, for which `are_enough` holds; None if even all of them are not
    enough."""
    for count in range(num_blocks + 1):
        chosen = spread(num_blocks, count) if count else []
        if are_enough(chosen):
            return chosen
    return None


def choose_for_room(sizes: Sequence[int], left: Sequence[int], room_bytes: int) -> list[int] | None:
    """Return the fewest that have to leave so that the others fit; `left` is what remains of one that leaves."""

    def fits(chosen: list[int]) -> bool:
        gone = set(chosen)
        return sum(left[at] if at in gone else size for at, size in enumerate(sizes)) <= room_bytes

    return choose_offloaded(len(sizes), fits)


class _Sized(Protocol):
    """A weight, or several that move together."""

    @property
    def nbytes(self) -> int: ...


Weight = TypeVar("Weight", bound=_Sized)
Key = TypeVar("Key")


def choose_fraction(units: Mapping[str, Sequence[Weight]], fraction: float) -> list[Weight]:
    """Return the weights of as many units as have at least this share of all bytes. Shared weights count once."""
    every = list(units.values())
    least = fraction * sum(each.nbytes for each in {each for own in every for each in own})

    def weights(chosen: Iterable[int]) -> list[Weight]:
        return list(dict.fromkeys(each for number in chosen for each in every[number]))

    found = choose_offloaded(len(every), lambda chosen: sum(each.nbytes for each in weights(chosen)) >= least)
    return weights(found or ())


def choose_last(sizes: Mapping[Key, float], fraction: float, always: Iterable[Key] = ()) -> set[Key]:
    """Return keys with at least this share of all bytes, including `always`: the first ones stay, as far as they fit.

    For state that is used once per step, after a backward: that of the first weights is needed last and used first.
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
