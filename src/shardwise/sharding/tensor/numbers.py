"""Compare a cut module with the whole one, number by number: one small forward and backward of each.

All ranks of the cut one are threads of this process (`ranks/simulated.py`), so nothing is sent, and every process gets
the same answer. The outputs of rows and of the module, the loss, and the gradient of every parameter are compared.
Neither run is random: dropout drops nothing, and noise is constant.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.sharding.stand_in import tensors_in
from shardwise.sharding.tensor.sharding import Shards
from shardwise.sharding.tensor.torch_encoders import layers_called
from shardwise.sharding.tensor.vocabulary import VocabParallelLogits
from shardwise.stages.checkpoints import nothing_recomputed
from shardwise.stages.full_precision import full_precision
from shardwise.stages.split.loss_copy import loss_of_copy
from shardwise.stages.split.python_state import PythonState, left_as_it_was
from shardwise.stages.split.script_values import asks_for_mode
from shardwise.stages.stage import Batch, Loss
from shardwise.stages.steady_draws import SteadyDraws, SteadyDropout, sets_seed
from shardwise.units import format_percent

#: The largest allowed difference, relative to the largest number. Modules that compute in float64 may still round to
#: float32 in places.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
#: Gradients below this fraction of the largest one are zero up to rounding.
_NOTHING = 1e-4
#: The same for vectors in float64.
_LEAST = 1e-10
#: Results beyond the first number come from repeated products of channels, and hide small differences. Then matrices
#: are multiplied by the second number, and the trial is repeated.
_LARGE, SMALL = 1e4, 0.2


@dataclass(kw_only=True)
class Course:
    """The results of a forward and a backward."""

    #: The outputs of the observed layers, in the order of their calls.
    marks: list[tuple[str, Tensor]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    #: Whether the forward draws random numbers, dropout aside.
    has_drawn: bool = False


@contextmanager
def precisely(device: torch.device) -> Iterator[None]:
    """Use full-precision matmuls, and restore generators afterwards. Process-wide, so enter it around all threads."""
    forked = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with full_precision(), forked, nothing_recomputed(), layers_called():
        yield


#: What a loss reaches, saved before it runs.
StateOfLoss = PythonState


def run(
    module: nn.Module, call: Callable[[nn.Module], Any], looked_at: Sequence[str], loss: Loss | None, batch: Batch,
    original: nn.Module, *, off: bool = False, before: StateOfLoss | None = None,
) -> Course:  # fmt: skip
    """Run one forward and backward of a copy of `original`, with the same output gradient in every course.

    With gradients `off` it runs as in evaluation. Simulated ranks share what a loss reaches (a count in a closure): the
    loss of each begins with the state `before` all of them, which the caller restores at the end.
    """
    course = Course()
    loss = None if loss is None else loss_of_copy(loss, original, module)
    handles = [
        module.get_submodule(name).register_forward_hook(
            lambda _, __, out, name=name: course.marks.append((name, out.detach())) if isinstance(out, Tensor) else None
        )
        for name in looked_at
    ]
    with torch.set_grad_enabled(not off), SteadyDropout(), SteadyDraws(has_seed=sets_seed(module)) as draws:
        output = call(module)
        course.has_drawn = draws.has_drawn
        for handle in handles:
            handle.remove()
        total: Tensor | None = None
        returned = [_whole(each) for each in tensors_in(output)]
        # A loss may write to its arguments.
        course.outputs = [each.detach().clone() for each in returned]
        for number, each in enumerate(returned):
            if each.requires_grad and each.is_floating_point():
                part = (each * _weights(each, number)).sum()
                total = part if total is None else total + part
        if loss is not None:
            if before is not None:
                before.restore()
            with left_as_it_was(loss) if before is None else nullcontext():
                made = loss(output, copy(batch))
            made = made[0] if isinstance(made, tuple) else made
            course.outputs.append(made.detach())
            total = made if total is None else total + made
        named = dict(module.named_parameters())
        wanted = [each for each in named.values() if each.requires_grad]
        if total is not None and wanted and not off:
            found = iter(torch.autograd.grad(total, wanted, allow_unused=True))
            course.gradients = {name: next(found) if each.requires_grad else None for name, each in named.items()}
    return course


def _whole(each: Tensor) -> Tensor:
    return each.whole() if isinstance(each, VocabParallelLogits) else each


def _weights(like: Tensor, number: int) -> Tensor:
    """Return the factors of a result in the sum of all results: the gradient with which the backward begins."""
    steps = torch.arange(like.numel(), device=like.device, dtype=torch.float64)
    return (steps * 0.7 + number + 1).sin().div_(max(1.0, like.numel() ** 0.5)).view(like.shape).to(like.dtype)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first difference: in a layer's output (`mark`), a parameter's gradient, or else the module's output."""

    mark: str = ""
    parameter: str = ""
    error: float = 0.0
    #: The error message, if ranks raised instead of returning a result.
    raised: str = ""

    def __str__(self) -> str:
        if self.raised:
            return f"with a part of its channels it raises: {self.raised}"
        what = (self.mark and f"what {self.mark} returns") or (self.parameter and f"the gradient of {self.parameter}")
        return f"{what or 'what the module returns'} differs by {format_percent(min(self.error, 9.99))}"


def compare(
    whole: Course, ranks: Sequence[Course], shards: Mapping[str, Shards], dtype: torch.dtype, *, with_marks: bool
) -> Difference | None:
    """Return the first difference between the whole module and its parts on all ranks: forward, then backward."""
    most = TOLERANCE[dtype]
    if with_marks:
        for (name, expected), (other, found) in zip(whole.marks, ranks[0].marks, strict=False):
            if name != other:
                break
            if (error := _error_of_made(expected, found)) > most:
                return Difference(mark=name, error=error)
    for each in ranks:
        if len(each.outputs) != len(whole.outputs):
            return Difference(error=1.0)
        errors = [_error_of_made(*pair) for pair in zip(whole.outputs, each.outputs, strict=True)]
        if errors and not max(errors) <= most:
            return Difference(error=max(errors))
    return _compare_gradients(whole, ranks, shards, most)


def is_large(course: Course) -> bool:
    """Whether numbers have grown so large that they could hide a difference."""
    return any(_largest(each) > _LARGE for _, each in course.marks if each.numel())


def may_differ(module: nn.Module) -> bool:
    """Whether a module may compute something else in evaluation mode."""
    return asks_for_mode(module)


def are_alike(one: Course, other: Course, dtype: torch.dtype) -> bool:
    """Whether two courses of one module have equal results, within the tolerance."""
    if len(one.outputs) != len(other.outputs):
        return False  # Of two heads, and of their mean.
    pairs = list(zip(one.outputs, other.outputs, strict=True))
    pairs += [
        (each, found)
        for name, each in one.gradients.items()
        if each is not None and (found := other.gradients.get(name)) is not None
    ]
    return all(_error(*pair) <= TOLERANCE[dtype] for pair in pairs)


def _compare_gradients(
    whole: Course, ranks: Sequence[Course], shards: Mapping[str, Shards], most: float
) -> Difference | None:
    there = [each for each in whole.gradients.values() if each is not None and each.numel()]
    largest = max((_largest(each) for each in there if each.is_floating_point()), default=0.0)
    worst: Difference | None = None
    for name, expected in whole.gradients.items():
        pieces = [each.gradients.get(name) for each in ranks]
        if expected is None and all(each is None for each in pieces):
            continue
        lie = shards[name]
        wanted = pieces[0].new_zeros(lie.shape) if expected is None else expected  # type: ignore[union-attr]
        for found in _assembled(pieces, lie, wanted):
            error = _error(wanted, found, floor=_NOTHING * largest)
            if error > most and (worst is None or error > worst.error):
                worst = Difference(parameter=name, error=error)
    return worst


def _assembled(pieces: Sequence[Tensor | None], lie: Shards, like: Tensor) -> list[Tensor]:
    """Return the gradients that an optimizer step would use, from those of all ranks."""
    if lie.dim is None:
        wholes = [torch.zeros_like(like) if each is None else each for each in pieces]
        return [torch.stack(wholes).sum(0)] if lie.is_partial else wholes
    total = torch.zeros_like(like)
    for rank, piece in enumerate(pieces):
        if piece is not None and not lie.is_partial:
            lie.put(total, piece, rank)
        elif piece is not None:
            part = torch.zeros_like(like)
            lie.put(part, piece, rank)
            total += part
    return [total]


def _largest(tensor: Tensor) -> float:
    """Return the largest absolute value, in one pass."""
    return float(torch.linalg.vector_norm(tensor, torch.inf))


def _error_of_made(expected: Tensor, found: Tensor) -> float:
    """Return the error of an output: over all numbers, or the median over its vectors, whichever is larger.

    Where products of channels make some tokens a million times as large as others, an error in all of them is
    negligible relative to the largest number.
    """
    error = _error(expected, found)
    if error != 0.0 and expected.dim() > 1 and expected.dtype is torch.float64 and expected.shape == found.shape:
        sizes = expected.abs().amax(-1)
        apart = (expected - found).abs().amax(-1) / sizes.clamp_min(max(_LEAST * float(sizes.max()), 1e-30))
        return max(error, float(apart.median()))
    return error


def _error(expected: Tensor, found: Tensor, floor: float = 0.0) -> float:
    """Return the largest difference of two tensors, relative to the largest number or to `floor`."""
    if expected.shape != found.shape:
        return 1.0
    if not expected.is_floating_point() or not expected.numel():
        return 0.0
    largest = max(_largest(expected), floor, 1e-30)
    error = _largest(expected - found)
    if error != error:  # NaN in the whole too, as in fully masked rows, tells nothing: compare the rest.
        same = (expected - found).abs().nan_to_num(0)[~expected.isnan() & ~expected.isinf()]
        alike = torch.equal(expected.isnan(), found.isnan())
        return float(same.max()) / largest if alike and same.numel() and largest == largest else float(not alike)
    return error / largest
