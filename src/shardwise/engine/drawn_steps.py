"""Check that replicas are at one place of their generators before optimizers that draw random numbers step.

    p.add_(torch.randn_like(p), alpha=noise)        in the step of SGLD: each replica that updates p draws for itself

Scripts call `torch.manual_seed(seed + rank)` so that forwards of replicas draw different numbers. Then replicas would
add different noise to the same weights, and go apart.
"""

from collections.abc import Iterable
from zlib import crc32

import torch
from torch.optim import Optimizer

from shardwise.errors import ShardwiseError
from shardwise.ranks.wires import Wires
from shardwise.states.coupled_steps import draws


class DrawnSteps:
    """Compares the generators of ranks, if one of the `optimizers` draws from them."""

    def __init__(self, optimizers: Iterable[Optimizer], wires: Wires) -> None:
        self._wires = wires
        several = wires.watch is not None
        self._kind = next((type(each).__name__ for each in optimizers if several and draws(each)), None)

    def check(self) -> None:
        """Refuse generators at different places. All ranks call this alike, before weights change."""
        if self._kind is None:
            return
        told = self._wires.gather(_place())
        other = next((rank for rank, place in enumerate(told) if place != told[0]), None)
        if other is not None:
            raise ShardwiseError(
                f"{self._kind}.step() draws random numbers, and ranks 0 and {other} are not at the same place of their"
                " generators: each would change the same weights in another way",
                remedy="torch.manual_seed(seed) alike on every rank, and again before each step if replicas draw"
                " different numbers in the forward",
            )


def _place() -> int:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return crc32(b"".join(each.numpy().tobytes() for each in states))
