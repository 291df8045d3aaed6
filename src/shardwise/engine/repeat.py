"""Repeat the forward and backward of a step and return a fingerprint of its gradients, without changing the training.

Replicas hold the same weights, so one can compute another's part: with `shift` 1, each computes the rows of the next.

    step      rows 0 on replica 0    rows 1 on replica 1    rows 2 on replica 2
    shift 1   rows 1 on replica 0    rows 2 on replica 1    rows 0 on replica 2

The gradients that a rank accumulates, before they are summed over replicas, must then equal those of its counterpart in
the next replica.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.engine.engine import Engine
from shardwise.planner.plan import Offload
from shardwise.stages.stage import Batch

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fingerprint(NamedTuple):
    """The sum of the elements' bits read as integers, and the sum of their squares.

    The first does not depend on the order, and changes if any bit changes.
    """

    bits: int
    square: float

    def is_near(self, other: "Fingerprint", tolerance: float) -> bool:
        """Whether two fingerprints are equal up to rounding."""
        return abs(self.square - other.square) <= tolerance * max(abs(self.square), abs(other.square))


class Prints:
    """Accumulates fingerprints of tensors. On a GPU they are read on request."""

    def __init__(self) -> None:
        self._bits: list[Tensor] = []
        self._squares: list[Tensor] = []

    @torch.no_grad()
    def add(self, tensor: Tensor) -> None:
        plain = tensor.detach().contiguous().reshape(-1)
        real = torch.view_as_real(plain).reshape(-1) if plain.is_complex() else plain
        self._bits.append(real.view(_WORDS[real.element_size()]).sum(dtype=torch.int64))
        wide = real.dtype if real.dtype == torch.float64 else torch.float32
        self._squares.append(real.to(wide).square().sum().double())

    def read(self) -> Fingerprint:
        bits = sum(int(each) for each in self._bits) % 2**63
        return Fingerprint(bits, sum(float(each) for each in self._squares))


def print_of(tensors: Iterable[Tensor]) -> Fingerprint:
    prints = Prints()
    for each in tensors:
        prints.add(each)
    return prints.read()


def why_not(engine: Engine) -> str | None:
    """Return why a step of this engine cannot be repeated; None if it can."""
    if engine.plan.offload != Offload():
        return "with offload weights change while the backward goes on"
    if engine.schedule.staleness:
        return "with two versions of the weights another step is always under way"
    if engine.plan.ep > 1 or engine.loads.are_there:
        return "layers of experts count what they were given"
    return None


@contextmanager
def looking(engine: Engine) -> Iterator[Prints]:
    """Fingerprint this rank's own gradients of the step inside this context."""
    prints, data = Prints(), engine.states.data
    data.look_at_gradients(prints.add)
    try:
        yield prints
    finally:
        data.look_at_gradients(None)


def repeat(engine: Engine, batch: Batch, *, shift: int = 0) -> Fingerprint:
    """Run forward and backward of a batch with the current weights. All ranks call this alike.

    Return the fingerprint of this rank's gradients for the rows of the replica that is `shift` after its own.
    """
    num_steps, buffers = engine.num_steps, {name: each.clone() for name, each in engine.buffers.items()}
    random = torch.get_rng_state()
    held, engine.states.update.holds = engine.states.update.holds, None
    try:
        with (
            engine.shown.open(),
            engine.wires.told_to_all(refusals=False),
            looking(engine) as prints,
            engine.execution.batches.of_replica(shift),
        ):
            engine.steps.train(batch, update=lambda _: None, is_plain=True)
        found = prints.read()
    finally:
        engine.states.update.holds = held
        engine.num_steps = num_steps
        torch.set_rng_state(random)
        with engine.shown.open():
            for name, each in buffers.items():
                engine.module.get_buffer(name).copy_(each)
    return found
