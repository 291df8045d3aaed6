"""Measure how many times as long ranks take for a model as its kernels take separately.

A kernel is timed again and again on the same few tensors, in moments without interference. In a step its inputs were
written by another kernel, or long ago, and the step is over when its slowest rank is done: of two ranks with equal
work, a different one is late each time, depending on the operating system and the host of a virtual machine.

    by themselves   |norm| |linear| |attention| |linear| ...       added up, as the planner does
    rank 0          |norm|linear--|attention|linear|....|          in a step: longer by a share of what is computed
    rank 1          |norm|linear|attention----|linear---|
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from shardwise.cluster.kernel import Kernel
from shardwise.cost.processor import operation_seconds
from shardwise.model.load import load_model
from shardwise.model.share import Share
from shardwise.nets.hf.catalogue import config_for
from shardwise.nets.loss import next_token_loss
from shardwise.nets.settings import Heads, Mlp, Settings
from shardwise.nets.transformer import Transformer
from shardwise.probing.steady import settled

#: Passes through a model, by its width. Call overheads weigh more in the narrow one, work in the wide one.
PASSES = {128: 12, 256: 6}
_ROWS, _TOKENS, _VOCABULARY, _LAYERS, _HEADS = 8, 128, 256, 4, 4
#: Bounds of the factor: outside of them, another process used the machine during one of the two measurements.
_LEAST_LONGER, _MOST_LONGER = 1.0, 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """The ranks that measure at once: `meet` is a barrier, `gather` returns what each rank has given."""

    meet: Callable[[], object] = lambda: None
    gather: Callable[[list[float]], Sequence[list[float]]] = lambda mine: [mine]


def measure_longer(kernels: Sequence[Kernel], crowd: Crowd) -> float:
    """Return the seconds of a model's forward and backward divided by those of its kernels. Every rank calls this."""
    taken, priced = 0.0, 0.0
    for width, count in PASSES.items():
        settings = _settings(width)
        by_rank = crowd.gather(_time(settings, count, crowd.meet))
        taken += settled([max(each) for each in zip(*by_rank, strict=True)]).seconds
        priced += _price(settings, kernels)
    return min(max(taken / priced, _LEAST_LONGER), _MOST_LONGER)


def small_model(width: int, rows: int) -> tuple[Transformer, Tensor]:
    """Return a model of a width, and tokens for it."""
    return Transformer(_settings(width)), torch.randint(_VOCABULARY, (rows, _TOKENS))


def _settings(width: int) -> Settings:
    return Settings(
        vocabulary=_VOCABULARY,
        width=width,
        num_layers=_LAYERS,
        length=_TOKENS,
        attention=Heads(num_heads=_HEADS, num_kv_heads=_HEADS, head_dim=width // _HEADS),
        mlp=Mlp(width=width * 8 // 3),
    )


def _time(settings: Settings, count: int, meet: Callable[[], object]) -> list[float]:
    """Return the seconds of forward and backward passes over rows of tokens, which all ranks begin together."""
    model, tokens = small_model(settings.width, _ROWS)
    seconds = list[float]()
    for _ in range(count + 1):
        model.zero_grad(set_to_none=False)  # As in an engine: gradients accumulate in place.
        meet()
        start = perf_counter()
        total, labels = next_token_loss(model(tokens), {"labels": tokens})
        torch.autograd.backward(total / labels)
        seconds.append(perf_counter() - start)
    return seconds[1:]


def _price(settings: Settings, kernels: Sequence[Kernel]) -> float:
    """Return the same from the kernels' times alone."""
    model = load_model(config_for(settings)[1])
    share = Share(sequence=_TOKENS, microbatch=_ROWS, width=4)
    return sum(
        float(sum(operation_seconds(kernels, operation, share)))
        for block in model.blocks
        for operation in block.operations
    )
