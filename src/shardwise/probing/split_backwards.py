"""Measure how much longer a backward takes in two halves, as zero-bubble schedules run it, than in one.

The first half keeps the gradients at every layer for the second half, so their memory cannot be reused meanwhile, and
autograd is started again for each layer (`execution/backward.py`). On a processor that costs time:

    whole      |---- inputs and weights ----|
    halves     |-- inputs, gradients kept --| |- weights -|

With more rows in a microbatch the additional time grows, but less than the backward does: a part of it is that of
calls. Two sizes of a microbatch tell the parts apart. The stage has two layers: one with more keeps more gradients, and
takes a larger part longer (two layers and four rows of 128 tokens 21 %, four layers 26 to 29 %, on a Xeon at 2.5 GHz).
"""

from collections.abc import Callable, Mapping
from time import perf_counter

import torch
from torch import Tensor

from shardwise.cluster.kernel import Split
from shardwise.cost.processor import num_cuts
from shardwise.execution.backward import full_backward, input_gradients
from shardwise.model.share import Share
from shardwise.nets.transformer import Transformer
from shardwise.probing.steady import settled
from shardwise.probing.whole_steps import blocks_of, small_model

#: Pairs of backwards that are timed for each size, and the rows of its microbatches.
PAIRS, _FEW, _MANY = 8, 2, 8
_WIDTH, _LAYERS = 128, 2
#: Beyond this fraction, another process used the machine during the measurement.
_MOST = 1.0


def measure_split(meet: Callable[[], object]) -> Split:
    """Return the additional time of a backward in two halves. Every rank calls this."""
    models = {rows: small_model(_WIDTH, rows, _LAYERS) for rows in (_FEW, _MANY)}
    whole: dict[int, list[float]] = {rows: [] for rows in models}
    halves: dict[int, list[float]] = {rows: [] for rows in models}
    for _ in range(PAIRS + 1):
        for rows, (model, tokens) in models.items():
            for seconds, run in ((whole[rows], _run_whole), (halves[rows], _run_halves)):
                hidden, output = _forward(model, tokens)
                gradient = torch.ones_like(output)
                meet()
                start = perf_counter()
                run(hidden, output, gradient)
                seconds.append(perf_counter() - start)
    return _split(*({rows: settled(taken[1:]).seconds for rows, taken in each.items()} for each in (whole, halves)))


def _split(whole: Mapping[int, float], halves: Mapping[int, float]) -> Split:
    """Solve `halves - whole = fraction x whole + calls x (seconds of a call)` for both sizes; neither is negative."""
    more = {rows: max(halves[rows] - whole[rows], 0.0) for rows in whole}
    cuts = float(sum(num_cuts(each, Share(sequence=1, microbatch=1, width=4)) for each in blocks_of(_WIDTH, _LAYERS)))
    slope = (more[_MANY] - more[_FEW]) / max(whole[_MANY] - whole[_FEW], 1e-9)
    fraction = min(max(slope, 0.0), more[_FEW] / whole[_FEW], _MOST)
    return Split(fraction, min(more[_FEW], _MOST * whole[_FEW]) / cuts - fraction * whole[_FEW] / cuts)


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
