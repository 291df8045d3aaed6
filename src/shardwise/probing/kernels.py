"""Time a transformer's operations on a CPU by kind: the planner's prices.

Each operation is called a few times with its results kept, as a forward keeps them, and then the backwards of all are
run: so memory is as cold for a kernel here as it is in a step. A large size gives the rate, a small one the overhead of
a call. All ranks of a machine time the same operation at the same moment and for as long, because in a step they share
caches and memory too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.cluster.kernel import FREE, Kernel
from shardwise.cost.processor import amounts
from shardwise.kernels.rotary import rotate_plain
from shardwise.model.load import load_model
from shardwise.model.operations import Attention, Matmul, Operation, Width
from shardwise.model.share import Share
from shardwise.probing.meetings import measure_meetings
from shardwise.probing.split_backwards import measure_split
from shardwise.probing.split_layers import measure_split_layers
from shardwise.probing.steady import settled
from shardwise.probing.whole_steps import Crowd, WholePasses

#: Seconds for one size of one kind, on every rank.
LIMIT_SECONDS = 0.15
#: Kinds and sizes that are timed; meetings take as long as sixteen of them, and whole models as thirty.
NUM_FIGURES = 75
_KEPT = 8
_TURNS = 3
_ROWS, _TOKENS, _WIDTH, _MLP, _HEADS, _VOCABULARY = 8, 128, 256, 688, 4, 512
_FEW = 4  # Tokens of the single row that times the overhead of calls.
_NARROW, _WIDE = 64, 256
_SHORT_HEAD, _LONG_HEAD = 32, 128
_PARAMETERS, _PARAMETER, _SMALL = 16, (512, 512), (16, 16)
#: Bytes of memory traffic per parameter in a step of Adam and the norm, as `cost/` counts them.
_OPTIMIZER_BYTES = 38

_LEAST = 4


def _goes_on(count: int, begun: float) -> bool:
    return count < _LEAST or perf_counter() - begun < LIMIT_SECONDS


class Both(NamedTuple):
    """Seconds of a call, and of its backward."""

    forward: float
    backward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A kind of operation, as torch computes it and as the cost model counts it, for rows of this many tokens."""

    operation: Operation
    run: Callable[..., Tensor | list[Tensor]]
    inputs: Callable[[int, int], Sequence[Tensor]]


def measure_kernels(crowd: Crowd) -> tuple[Kernel, ...]:
    """Time every kind, on this thread. Every rank calls this."""
    found, passes = list[Kernel](), WholePasses(crowd)
    for kind, trial in _simple().items():
        passes.run()
        much, few = (_time(trial, rows, tokens, crowd) for rows, tokens in ((_ROWS, _TOKENS), (1, _FEW)))
        found.append(_kernel(kind, _amount(trial, _ROWS, _TOKENS)[0], much, _amount(trial, 1, _FEW)[0], few))
    for first, second, trials in (
        ("matmul", "operands", [_linear(_NARROW), _linear(_WIDE)]),
        ("attention", "scores", [_attention(_SHORT_HEAD), _attention(_LONG_HEAD)]),
    ):
        passes.run()
        found += _two_ways(first, second, trials, crowd)
    for measure in (_masks, _optimizer):
        passes.run()
        found.append(measure(crowd))
    passes.run()
    longer = passes.compare(found)
    in_a_model = [longer.of(each) for each in found]
    lost = measure_meetings(crowd)
    split = measure_split(crowd.meet)
    return (
        *in_a_model,
        measure_split_layers(crowd.meet),
        Kernel(kind="meeting", forward=FREE, backward=FREE, forward_call=lost),
        Kernel(kind="halves", forward=FREE, backward=1.0 / (1.0 + split.fraction), backward_call=split.call_seconds),
    )


def _simple() -> dict[str, Trial]:
    """Return the kinds whose work is counted in one unit."""
    model = load_model({
        "model_type": "llama", "hidden_size": _WIDTH, "intermediate_size": _MLP, "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS, "num_hidden_layers": 1, "vocab_size": _VOCABULARY,
        "max_position_embeddings": _TOKENS, "tie_word_embeddings": False,
    })  # fmt: skip
    operations = {each.name: each for block in model.blocks for each in block.operations}
    head = _WIDTH // _HEADS
    return {
        "norm": Trial(
            operation=operations["input_layernorm"],
            run=lambda x, weight: functional.rms_norm(x, (_WIDTH,), weight),
            inputs=lambda rows, tokens: [torch.randn(rows, tokens, _WIDTH), torch.ones(_WIDTH)],
        ),
        "nonlinearity": Trial(
            operation=operations["nonlinearity"],
            run=lambda gate, up: functional.silu(gate) * up,
            inputs=lambda rows, tokens: [torch.randn(rows, tokens, _MLP) for _ in range(2)],
        ),
        "rotation": Trial(
            operation=operations["rotation"],
            run=_rotate,
            inputs=lambda rows, tokens: [torch.randn(rows, tokens, _HEADS, head).transpose(1, 2) for _ in range(2)],
        ),
        "loss": Trial(
            operation=operations["loss"],
            run=_loss,
            inputs=lambda rows, tokens: [torch.randn(rows, tokens, _VOCABULARY)],
        ),
        "elementwise": Trial(
            operation=operations["residual"],
            run=torch.add,
            inputs=lambda rows, tokens: [torch.randn(rows, tokens, _WIDTH) for _ in range(2)],
        ),
    }


def _rotate(query: Tensor, key: Tensor) -> list[Tensor]:
    angle = torch.ones(1, query.shape[2], query.shape[3] // 2)
    return [rotate_plain(each, angle, angle, interleaved=False) for each in (query, key)]


def _loss(logits: Tensor) -> Tensor:
    flat = logits.flatten(0, 1)
    return functional.cross_entropy(flat, torch.zeros(flat.shape[0], dtype=torch.long))


def _linear(width: int) -> Trial:
    """Return a linear layer on [rows, tokens, width]: with two dims torch may use another kernel."""
    return Trial(
        operation=Matmul(name="linear", inputs=Width(width), outputs=(Width(width),)),
        run=functional.linear,
        inputs=lambda rows, tokens: [torch.randn(rows, tokens, width), torch.randn(width, width)],
    )


def _attention(head: int) -> Trial:
    return Trial(
        operation=Attention(name="attention", heads=_HEADS, kv_heads=_HEADS, qk_dim=head, v_dim=head),
        run=partial(functional.scaled_dot_product_attention, is_causal=True),
        inputs=lambda rows, tokens: [torch.randn(rows, _HEADS, tokens, head) for _ in range(3)],
    )


def _masks(crowd: Crowd) -> Kernel:
    """Time how much longer attention takes with an explicit mask than with a causal one."""
    plain = _attention(_SHORT_HEAD)
    masked = replace(plain, run=_attend_masked)
    pairs = _amount(plain, _ROWS, _TOKENS)[1]
    # Alternate the two, because the difference of similar times counts.
    taken = [[_time(trial, _ROWS, _TOKENS, crowd) for trial in (plain, masked)] for _ in range(_TURNS)]
    rates = []
    for index in range(2):  # Forward, then backward.
        longer = median([with_one[index] - without[index] for without, with_one in taken])
        rates.append(pairs[index] / longer if longer > 0 else FREE)
    return Kernel(kind="masks", forward=rates[0], backward=rates[1])


def _attend_masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=_seen(query.shape[0], query.shape[2]))


@cache
def _seen(rows: int, tokens: int) -> Tensor:
    """Return a mask as for rows with several documents: made once for all layers."""
    return torch.ones(tokens, tokens, dtype=torch.bool).tril().expand(rows, 1, tokens, tokens).contiguous()


def _amount(trial: Trial, rows: int, tokens: int) -> list[Both]:
    """Return the work that the cost model counts, in each of its units."""
    share = Share(sequence=tokens, microbatch=rows, width=4)
    return [
        Both(float(passes.forward), float(passes.input + passes.weight))
        for _, passes in amounts(trial.operation, share)[:2]
    ]


def _time(trial: Trial, rows: int, tokens: int, crowd: Crowd) -> Both:
    """Return the seconds per call, over several calls whose results are kept."""
    inputs = [[each.requires_grad_() for each in trial.inputs(rows, tokens)] for _ in range(_KEPT)]
    crowd.meet()
    forward, backward, begun = list[float](), list[float](), perf_counter()
    while _goes_on(len(forward), begun):
        start = perf_counter()
        made = [trial.run(*each) for each in inputs]
        middle = perf_counter()
        outputs = [tensor for each in made for tensor in (each if isinstance(each, list) else [each])]
        gradients = [torch.ones_like(each) for each in outputs]
        begin = perf_counter()
        torch.autograd.backward(outputs, gradients)
        end = perf_counter()
        forward.append((middle - start) / _KEPT)
        backward.append((end - begin) / _KEPT)
        for each in inputs:
            for tensor in each:
                tensor.grad = None
    return Both(settled(forward[1:]).seconds, settled(backward[1:]).seconds)


def _kernel(kind: str, much: Both, seconds: Both, few: Both, little: Both) -> Kernel:
    """Fit a rate and a call overhead to both sizes."""
    lines = [_line(*each) for each in zip(much, seconds, few, little, strict=True)]
    return Kernel(
        kind=kind,
        forward=lines[0][0],
        backward=lines[1][0],
        forward_call=lines[0][1],
        backward_call=lines[1][1],
    )


def _line(much: float, seconds: float, few: float, little: float) -> tuple[float, float]:
    """Solve `seconds = call + amount / rate` for both amounts, with a call that is not negative."""
    rate = (much - few) / max(seconds - little, 1e-9)
    call = little - few / rate
    return (rate, call) if call > 0 else (much / seconds, 0.0)


def _two_ways(first: str, second: str, trials: Sequence[Trial], crowd: Crowd) -> list[Kernel]:
    """Fit kinds whose work is counted in two units: both rates, from two shapes with different shares of them."""
    seconds = [_time(trial, _ROWS, _TOKENS, crowd) for trial in trials]
    calls = _time(trials[0], 1, _FEW, crowd)
    amount = [_amount(trial, _ROWS, _TOKENS) for trial in trials]
    rates = []
    for index in range(2):  # Forward, then backward.
        work = [[each[index] for each in ways] for ways in amount]
        taken = [max(each[index] - calls[index], 1e-9) for each in seconds]
        rates.append(_rates(work, taken))
    return [
        Kernel(
            kind=kind,
            forward=rates[0][way],
            backward=rates[1][way],
            forward_call=calls.forward if way == 0 else 0.0,
            backward_call=calls.backward if way == 0 else 0.0,
        )
        for way, kind in enumerate((first, second))
    ]


def _rates(work: list[list[float]], seconds: list[float]) -> tuple[float, float]:
    """Solve `seconds = a / rate + b / other rate` for two shapes. If noise makes a rate negative, it is free."""
    (a, b), (c, d) = work
    determinant = a * d - b * c
    first, second = (
        (seconds[0] * d - seconds[1] * b) / determinant,
        (a * seconds[1] - c * seconds[0]) / determinant,
    )
    if first <= 0 or second <= 0:
        return c / seconds[1], FREE
    return 1.0 / first, 1.0 / second


def _optimizer(crowd: Crowd) -> Kernel:
    """Time AdamW's step and the norm before it: bytes/s beyond the cache's size, and the call per tensor."""
    (much, seconds), (few, little) = (_time_optimizer(shape, crowd) for shape in (_PARAMETER, _SMALL))
    rate, call = _line(much, seconds, few, little)
    return Kernel(kind="optimizer", forward=rate, backward=rate, forward_call=call)


def _time_optimizer(shape: tuple[int, int], crowd: Crowd) -> tuple[float, float]:
    """Return a tensor's bytes, as `cost/` counts them, and its seconds."""
    parameters = [nn.Parameter(torch.randn(shape)) for _ in range(_PARAMETERS)]
    for each in parameters:
        each.grad = torch.ones_like(each)
    optimizer = torch.optim.AdamW(parameters)
    crowd.meet()
    seconds, begun = list[float](), perf_counter()
    while _goes_on(len(seconds), begun):
        start = perf_counter()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        seconds.append((perf_counter() - start) / _PARAMETERS)
    return float(_OPTIMIZER_BYTES * parameters[0].numel()), settled(seconds[1:]).seconds
