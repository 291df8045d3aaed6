"""Whose the bytes are that a rank holds during a step: parameters, gradients, optimizer, activations."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardwise.schedule.instruction import BACKWARD, Instruction, Kind
from shardwise.trace.events import Holding

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS = "parameters", "gradients", "optimizer", "activations"

#: An instruction that was run, from when to when.
Ran = tuple[Instruction, float, float]


def holdings_of(
    rank: int, ran: Iterable[Ran], *, begin: float, state: Mapping[str, int], kept: Mapping[int, int]
) -> Iterator[Holding]:
    """What a rank held in a step. `state` are bytes by owner, `kept` those that a forward of each stage keeps.

    Parameters and the optimizer's state are there all the time, gradients from the first backward on, activations from
    a forward's start to its backward's end.
    """
    for owner in (PARAMETERS, OPTIMIZER):
        if state.get(owner):
            yield Holding(rank, owner, begin, state[owner])
    has_gradients = False
    for instruction, start, end in ran:
        for part in instruction.parts:
            if part.kind in BACKWARD and not has_gradients and state.get(GRADIENTS):
                has_gradients = True
                yield Holding(rank, GRADIENTS, start, state[GRADIENTS])
            num_bytes = kept.get(part.stage, 0)
            if num_bytes and part.kind is Kind.F:
                yield Holding(rank, ACTIVATIONS, start, num_bytes)
            elif num_bytes and part.kind in (Kind.B, Kind.W):
                yield Holding(rank, ACTIVATIONS, end, -num_bytes)


def state_bytes(
    held: Iterable[Tensor], gradients: Iterable[Tensor | None], optimizers: Iterable[Optimizer]
) -> dict[str, int]:
    """Bytes by owner, of tensors that are there now."""
    states: Iterator[Any] = (
        each for optimizer in optimizers for state in optimizer.state.values() for each in state.values()
    )
    return {
        PARAMETERS: sum(each.nbytes for each in held),
        GRADIENTS: sum(each.nbytes for each in gradients if each is not None),
        OPTIMIZER: sum(each.nbytes for each in states if isinstance(each, Tensor)),
    }
