"""Check that ranks of one replica draw the same random numbers, if a forward or a loss draws any.

Scripts call `torch.manual_seed(seed + rank)` so that replicas draw different numbers. But ranks that have parts of one
layer (tp), of one sequence (cp) or of its experts compute one forward together, and must draw alike: a mask of tokens,
a factor, whether a layer is skipped. Nothing is compared as long as steps draw nothing: dropout does not use these
generators (`sharding/dropout.py`).

Threads of the script itself (a loader that prepares batches) draw from the same generators at any time. While there are
such threads, a change of a generator is attributed to a step only if the code of the forward or the loss names a
function that draws from it; otherwise to those threads.
"""

import hashlib
import random
import threading
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch

from shardwise.errors import ShardwiseError
from shardwise.stages.split.names_reached import may_draw_by
from shardwise.stages.split.python_draws import told_of_numpy

#: The bits of a hash: a double holds them exactly.
_BITS = 48


class SameDraws:
    """The states of this rank's generators at the start of a step, and which of them steps draw from.

    `is_early`: the hash of a step is sent before all of its forwards are over, as with stages; then draws of earlier
    steps are compared. Before a forward they are compared if the code of what is `computed`, a module and a loss, names
    what draws, unless a trial has drawn nothing from torch's generators: then `of_torch` is false. After it they are
    compared if it has drawn: dropouts that are not ours (of an LSTM) are off in trials.
    """

    def __init__(self, device: torch.device, computed: Sequence[Any], *, is_early: bool, of_torch: bool = True) -> None:
        self._device, self._is_early = device, is_early
        #: Whether a step may draw from the generators of Python, NumPy and torch, by its code.
        self._by_code = cache(partial(may_draw_by, *computed))
        self._of_torch = of_torch
        self._before: list[bytes] = []
        self._drawn: set[int] = set()
        self._had_others = False

    def early(self, *, in_python: bool) -> float:
        """Return a hash of the generators that forwards draw from, before any has; 0 if they draw from none.

        What skips a layer at random on one rank would leave another waiting for it. `in_python`: the forward has drawn
        from the generators of Python or NumPy.
        """
        python, numpy, of_torch = self._by_code()  # A thread of the script may have drawn during the trial.
        of_torch = of_torch and self._of_torch
        asked = (in_python and python, in_python and numpy, of_torch, of_torch)
        kept = [state for state, is_asked in zip(self._told(), asked, strict=False) if is_asked]
        return _hash_of(kept) if kept else 0.0

    def begin(self) -> None:
        self._before, self._had_others = self._told(), _are_others_there()

    def look(self) -> None:
        """Find the generators that were drawn from since the step began."""
        pairs = zip(self._before, self._told(), strict=True)
        moved = {number for number, (was, now) in enumerate(pairs) if was != now} - self._drawn
        if moved and (self._had_others or _are_others_there()):
            python, numpy, of_torch = self._by_code()
            moved = {each for each in moved if (python, numpy, of_torch, of_torch)[each]}
        self._drawn |= moved

    @property
    def number(self) -> float:
        """A hash that is equal on ranks with equal draws; 0 if nothing is drawn."""
        if not self._is_early:
            self.look()
        if not self._drawn:
            return 0.0
        return _hash_of([self._before[each] for each in sorted(self._drawn)])

    def _told(self) -> list[bytes]:
        """Return for each generator a value that is equal as long as nothing is drawn from it."""
        _, words, normal = random.getstate()
        found = [f"{hash(words)} {normal}".encode(), told_of_numpy() or b""]
        found.append(torch.get_rng_state().numpy().tobytes())
        if self._device.type == "cuda":
            found.append(torch.cuda.get_rng_state(self._device).numpy().tobytes())
        return found


def _hash_of(states: Sequence[bytes]) -> float:
    found = hashlib.blake2b(b"".join(states), digest_size=_BITS // 8 - 1)
    return float(1 + int.from_bytes(found.digest(), "little"))


def _are_others_there() -> bool:
    """Whether the script, or a library, has threads beside the one that trains. Our own draw nothing."""
    here = threading.get_ident()
    return any(each.ident != here and not each.name.startswith("shardwise") for each in threading.enumerate())


def check_draws(found: Sequence[float], together: Sequence[object]) -> None:
    """Refuse ranks that compute together, and are not at the same place; 0 of one that has drawn nothing yet."""
    first: dict[object, int] = {}
    for rank, (number, group) in enumerate(zip(found, together, strict=True)):
        other = first.setdefault(group, rank) if number else rank
        if found[other] != number:
            raise ShardwiseError(
                f"the forward or the loss draws at random, and ranks {other} and {rank}, which compute it together, are"
                " not at the same place of their generators: each would draw something else",
                remedy="torch.manual_seed, random.seed and numpy.random.seed alike on ranks of one replica:"
                " index, _ = sw.replica_of(plan), and torch.manual_seed(seed + index)",
            )


def are_alike(found: Sequence[float], together: Sequence[object]) -> bool:
    """Whether all that have drawn, and compute together, were at one place."""
    drawn = {(group, number) for number, group in zip(found, together, strict=True) if number}
    return len(drawn) == len({group for group, _ in drawn})
