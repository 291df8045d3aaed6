"""Measure how much longer ranks take for a model than its kernels take separately.

A kernel is timed again and again on the same few tensors, in moments without interference. In a step its inputs were
written by another kernel, or long ago, and the step is over when its slowest rank is done: of two ranks with equal
work, a different one is late each time, depending on the operating system and the host of a virtual machine. And
around every call a model has Python of its own, mostly in its forward: modules, views, and the nodes of autograd.

    by themselves   |norm| |linear| |attention| |linear| ...       added up, as the planner does
    rank 0          .|norm|.|linear--|.|attention|.|linear|....|   in a step: longer by a share of what is computed,
    rank 1          .|norm|.|linear|.|attention----|.|linear---|   and by a time for every call

Models with much work per call and with little tell the two apart. Their passes are run between the measurements of
kernels, a few at a time: a core of a virtual machine may be a third slower for a second, or for minutes, and what is
compared has to be of the same moments.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.cluster.kernel import Kernel
from shardwise.cost.processor import num_calls, operation_seconds
from shardwise.model.load import load_model
from shardwise.model.model import Block
from shardwise.model.operations import Operation
from shardwise.model.share import Share
from shardwise.nets.hf.catalogue import config_for
from shardwise.nets.loss import next_token_loss
from shardwise.nets.settings import Heads, Mlp, Settings
from shardwise.nets.transformer import Transformer
from shardwise.probing.steady import settled


class Size(NamedTuple):
    """The width of a model, and the rows of its batch."""

    width: int
    rows: int


#: In passes of the first, calls weigh more; in those of the others, work.
LITTLE, MUCH = Size(128, 1), (Size(128, 8), Size(256, 4))
_TOKENS, _VOCABULARY, _LAYERS, _HEADS = 128, 256, 4, 4
#: Bounds of the factor: outside of them, another process used the machine during one of the two measurements.
_LEAST_LONGER, _MOST_LONGER = 1.0, 2.0
#: Kinds that are called by a model.
_CALLED = ("matmul", "attention", "norm", "nonlinearity", "rotation", "loss", "elementwise")


class Passed(NamedTuple):
    """Seconds of a forward and of its backward."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """The ranks that measure at once: `meet` is a barrier, `gather` returns what each rank has given, and `add` adds a
    tensor to those of the others, in place."""

    meet: Callable[[], object] = lambda: None
    gather: Callable[[list[Passed]], Sequence[list[Passed]]] = lambda mine: [mine]
    add: Callable[[Tensor], object] = lambda _: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Longer:
    """Kernels in a model: how many times their seconds, and seconds that each call has in addition.

    The latter are negative in a backward that costs less than those of its kernels. Each of these was timed with leaves
    as its inputs, whose gradients autograd stores; in a model it hands most of them on.
    """

    times: float
    forward_call: float
    backward_call: float

    def of(self, kernel: Kernel) -> Kernel:
        """Return a kernel as it is in a model."""
        slower = kernel.taking_turns(1.0 / self.times)
        if kernel.kind not in _CALLED:
            return slower
        return replace(
            slower,
            forward_call=max(slower.forward_call + self.forward_call, 0.0),
            backward_call=max(slower.backward_call + self.backward_call, 0.0),
        )


class WholePasses:
    """Passes of small models, which all ranks begin together. Every rank makes one, and calls its methods."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd
        self._models = {size: small_model(*size) for size in (LITTLE, *MUCH)}
        self._taken: dict[Size, list[Passed]] = {size: [] for size in self._models}
        for model, tokens in self._models.values():
            timed_pass(model, tokens)

    def run(self) -> None:
        """Run one pass of each model."""
        for size, (model, tokens) in self._models.items():
            model.zero_grad(set_to_none=False)  # As in an engine: gradients accumulate in place.
            self._crowd.meet()
            self._taken[size].append(timed_pass(model, tokens))

    def compare(self, kernels: Sequence[Kernel]) -> Longer:
        """Return how much longer the passes took than their kernels do."""
        taken = {size: _of_slowest(self._crowd.gather(mine)) for size, mine in self._taken.items()}
        return compare(taken, kernels)


def compare(taken: dict[Size, Passed], kernels: Sequence[Kernel]) -> Longer:
    """Solve `seconds = times x kernels + calls x (seconds of a call)` for passes with much work, and with little."""
    prices = {size: pass_seconds(size, kernels) for size in taken}
    counts = {size: _count(size) for size in taken}
    share = sum(counts[size] for size in MUCH) / counts[LITTLE]
    beyond = sum(taken[size].total for size in MUCH) - share * taken[LITTLE].total
    priced = sum(prices[size].total for size in MUCH) - share * prices[LITTLE].total
    times = min(max(beyond / priced, _LEAST_LONGER), _MOST_LONGER)
    forward, backward = (
        (seconds - times * price) / counts[LITTLE] for seconds, price in zip(taken[LITTLE], prices[LITTLE], strict=True)
    )
    return Longer(times=times, forward_call=forward, backward_call=backward)


def _of_slowest(by_rank: Sequence[list[Passed]]) -> Passed:
    """Return the pass to use: each is as long as that of its slowest rank."""
    slowest = [max(each, key=lambda passed: passed.total) for each in zip(*by_rank, strict=True)]
    seconds = settled([each.total for each in slowest]).seconds
    forward = sum(each.forward for each in slowest) / sum(each.total for each in slowest)
    return Passed(seconds * forward, seconds * (1.0 - forward))


def timed_pass(model: Transformer, tokens: Tensor) -> Passed:
    """Run a model forward and backward."""
    start = perf_counter()
    total, labels = next_token_loss(model(tokens), {"labels": tokens})
    loss = total / labels
    middle = perf_counter()
    torch.autograd.backward(loss)
    return Passed(middle - start, perf_counter() - middle)


def small_model(width: int, rows: int, num_layers: int = _LAYERS) -> tuple[Transformer, Tensor]:
    """Return a model of a width, and tokens for it."""
    return Transformer(settings_of(width, num_layers)), torch.randint(_VOCABULARY, (rows, _TOKENS))


def settings_of(width: int, num_layers: int = _LAYERS) -> Settings:
    """Return the settings of a small model."""
    return Settings(
        vocabulary=_VOCABULARY,
        width=width,
        num_layers=num_layers,
        length=_TOKENS,
        attention=Heads(num_heads=_HEADS, num_kv_heads=_HEADS, head_dim=width // _HEADS),
        mlp=Mlp(width=width * 8 // 3),
    )


def pass_seconds(size: Size, kernels: Sequence[Kernel]) -> Passed:
    """Return the seconds of a pass from the kernels' times alone."""
    forward, backward = 0.0, 0.0
    for operation, share in _operations(size):
        seconds = operation_seconds(kernels, operation, share)
        forward += float(seconds.forward)
        backward += float(seconds.input + seconds.weight)
    return Passed(forward, backward)


def _count(size: Size) -> int:
    """Return the calls of a pass."""
    return sum(int(num_calls(operation, share)) for operation, share in _operations(size))


def _operations(size: Size) -> list[tuple[Operation, Share]]:
    share = Share(sequence=_TOKENS, microbatch=size.rows, width=4)
    return [(operation, share) for block in blocks_of(size.width) for operation in block.operations]


def blocks_of(width: int, num_layers: int = _LAYERS) -> Sequence[Block]:
    """Return the blocks of a small model, as the planner counts them."""
    return load_model(config_for(settings_of(width, num_layers))[1]).blocks
