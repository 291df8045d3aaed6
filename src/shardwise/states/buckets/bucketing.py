"""Which parameters share a bucket.

Only those that are alike in all that happens to a bucket as a whole: the stages that use them, the ranks that hold them
too, their type. They stand in it in the reverse of the order in which a module names them, which is about the order in
which a backward is done with them; and a bucket is no larger than it must be for its transfer to be worth while, so
that the first can be on its way while the others fill.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.ranks.mesh import Replicas

#: A byte of a sum costs more in small buckets, between CPU processes; but the last bucket of a backward has nothing
#: left to hide behind.
BUCKET_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """What the parameters of a bucket have in common.

    `stages` of this rank use them, `unit` calls them where weights are gathered unit by unit; `tie` is the number of
    the tie that other ranks' stages share them by. `is_partial`: tensor parallel ranks each have a part of their sums.
    """

    stages: frozenset[int]
    unit: str | None
    tie: int | None
    replicas: Replicas
    dtype: torch.dtype
    device: torch.device
    trains: bool
    is_partial: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Members:
    """A bucket to be: its parameters by their original names."""

    home: Home
    parameters: Mapping[str, nn.Parameter]

    @property
    def nbytes(self) -> int:
        """What they take on every rank that has them whole."""
        return sum(each.numel() for each in self.parameters.values()) * self.home.dtype.itemsize


def share_out(
    parameters: Mapping[int, Mapping[str, nn.Parameter]],
    home_of: Callable[[str, nn.Parameter, frozenset[int]], Home],
    most_bytes: int | None,
) -> list[Members]:
    """Put the parameters of each stage into buckets; `most_bytes` None puts all of a home into one.

    The buckets of later stages come first, as their backwards do.
    """
    users: dict[str, set[int]] = {}
    found: dict[str, nn.Parameter] = {}
    for stage in sorted(parameters, reverse=True):
        for name, parameter in reversed(list(parameters[stage].items())):
            users.setdefault(name, set()).add(stage)
            found.setdefault(name, parameter)
    homes: dict[Home, list[str]] = {}
    for name, parameter in found.items():
        homes.setdefault(home_of(name, parameter, frozenset(users[name])), []).append(name)
    return [
        Members(home=home, parameters={name: found[name] for name in names})
        for home, mine in homes.items()
        for names in _cut(mine, [found[name].numel() * home.dtype.itemsize for name in mine], most_bytes)
    ]


def _cut(names: Sequence[str], sizes: Sequence[int], most_bytes: int | None) -> list[list[str]]:
    """Names in runs of about that many bytes, each of at least one."""
    runs: list[list[str]] = [[]]
    held = 0
    for name, size in zip(names, sizes, strict=True):
        if most_bytes is not None and runs[-1] and held + size > most_bytes:
            runs.append([])
            held = 0
        runs[-1].append(name)
        held += size
    return runs
