"""Measure how much longer a backward takes in two halves, as zero-bubble schedules run it, than in one.

The first half keeps the gradients at every layer for the second half, so their memory cannot be reused meanwhile, and
autograd is started again for each layer (`execution/backward.py`). On a processor that costs time:

    whole      |---- inputs and weights ----|
    halves     |-- inputs, gradients kept --| |- weights -|
"""

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

from shardwise.execution.backward import full_backward, input_gradients
from shardwise.nets.transformer import Transformer
from shardwise.probing.steady import settled
from shardwise.probing.whole_steps import small_model

#: Pairs of backwards that are timed, and the rows of a microbatch.
PAIRS, _ROWS = 8, 4
_WIDTH = 128
#: Beyond this fraction, another process used the machine during the measurement.
_MOST = 1.0


def measure_split(meet: Callable[[], object]) -> float:
    """Return the additional time of a backward in two halves, as a fraction of a whole one. Every rank calls this."""
    model, tokens = small_model(_WIDTH, _ROWS)
    whole, halves = list[float](), list[float]()
    for _ in range(PAIRS + 1):
        for seconds, run in ((whole, _run_whole), (halves, _run_halves)):
            hidden, output = _forward(model, tokens)
            gradient = torch.ones_like(output)
            meet()
            start = perf_counter()
            run(hidden, output, gradient)
            seconds.append(perf_counter() - start)
    return min(max(settled(halves[1:]).seconds / settled(whole[1:]).seconds - 1.0, 0.0), _MOST)


def _forward(model: Transformer, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Run all but the embedding on a leaf, as a later stage of a pipeline does. Return the leaf and the output."""
    leaves: list[Tensor] = []

    def as_leaf(_: object, __: object, embedded: Tensor) -> Tensor:
        leaves.append(embedded.detach().requires_grad_())
        return leaves[0]

    handle = model.embed.register_forward_hook(as_leaf)
    try:
        output = model(tokens)
    finally:
        handle.remove()
    return leaves[0], output


def _run_whole(_: Tensor, output: Tensor, gradient: Tensor) -> None:
    full_backward([output], [gradient])


def _run_halves(hidden: Tensor, output: Tensor, gradient: Tensor) -> None:
    input_gradients([output], [gradient], [hidden]).run()
