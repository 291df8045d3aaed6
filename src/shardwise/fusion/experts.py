"""Recognise experts stored as two parameters: a gated MLP for each, and the weighted sum over those chosen.

hidden [tokens, width], chosen [tokens, k], weights [tokens, k]

rows sorted by expert ── gate and up in one product ── activation(gate) * up ── down ── back at their tokens
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardwise.fusion.example import computes, small_copy
from shardwise.kernels.choose import FLOATS, takes_kernel
from shardwise.kernels.experts import grouped_matmul, make_order, permute, unpermute
from shardwise.kernels.gated import ACTIVATIONS, Activation, gated

_WIDTH, _INNER, _TOKENS, _CHOSEN = 8, 16, 7, 2


@dataclass(frozen=True, slots=True)
class ExpertsForward:
    """The names of the parameters, [experts, 2 inner, width] and [experts, width, inner], or transposed."""

    both: str
    down: str
    activation: Activation
    is_transposed: bool
    is_turned: bool

    def __call__(self, module: Any, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if len(args) != 3 or kwargs or not self._takes(*args):
            return own(module, *args, **kwargs)
        return self.compute(module, *args)

    def _takes(self, hidden: Any, chosen: Any, weights: Any) -> bool:
        if torch.compiler.is_compiling() or not all(isinstance(each, Tensor) for each in (hidden, chosen, weights)):
            return False
        if hidden.dim() != 2 or chosen.dim() != 2 or chosen.shape != weights.shape or not hidden.numel():
            return False
        # Trials of a cut run in float64, which the kernel lacks: there the module's own forward runs, without a
        # warning.
        return hidden.dtype in FLOATS and takes_kernel("permute", hidden)

    def compute(
        self, module: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor, *, kernels: bool = True
    ) -> Tensor:
        first: Tensor = module.get_parameter(self.both)
        second: Tensor = module.get_parameter(self.down)
        if not self.is_transposed:
            first, second = first.transpose(1, 2), second.transpose(1, 2)
        order = make_order(chosen, first.shape[0])
        one, other = grouped_matmul(permute(hidden, order, kernels=kernels), first, order.counts).chunk(2, dim=-1)
        gate, up = (other, one) if self.is_turned else (one, other)
        made = grouped_matmul(gated(gate, up, self.activation, kernels=kernels), second, order.counts)
        return unpermute(made, weights, order, kernels=kernels).to(hidden.dtype)

    def __str__(self) -> str:
        return f"experts with a {self.activation} gate"


def find_experts(module: nn.Module) -> ExpertsForward | str | None:
    """Return the experts of a module, or the reason why they are not replaced; None if it does not look like
    experts."""
    shapes = {name: each.shape for name, each in module.named_parameters(recurse=False)}
    if not any(len(each) == 3 for each in shapes.values()):
        return None
    taken = [each for each in inspect.signature(module.forward).parameters.values() if each.default is each.empty]
    are_alike = len({each[0] for each in shapes.values()}) == 1 and all(len(each) == 3 for each in shapes.values())
    if len(shapes) != 2 or len(taken) != 3 or not are_alike:
        if "expert" not in type(module).__name__.lower():
            return None
        return "its experts have another form than two parameters, called with states, experts and weights"
    count = next(iter(shapes.values()))[0]
    generator = torch.Generator("cpu").manual_seed(6)
    hidden = torch.randn((_TOKENS, _WIDTH), generator=generator, device="cpu")
    scores = torch.rand((_TOKENS, count), generator=generator, device="cpu")
    weights, chosen = scores.topk(min(_CHOSEN, count), dim=-1)
    for both, down in permutations(shapes):
        for is_transposed in (False, True):
            sizes = {both: (count, 2 * _INNER, _WIDTH), down: (count, _WIDTH, _INNER)}
            if is_transposed:
                sizes = {name: (count, *reversed(size[1:])) for name, size in sizes.items()}
            if not _are_proportional(shapes[both], shapes[down], is_transposed=is_transposed):
                continue
            twin = small_copy(module, shapes=sizes)
            for activation, is_turned in product(ACTIVATIONS, (False, True)):
                form = ExpertsForward(both, down, cast(Activation, activation), is_transposed, is_turned)

                def plain(hidden: Tensor, weights: Tensor, form: ExpertsForward = form, twin: Any = twin) -> Tensor:
                    return form.compute(twin, hidden, chosen, weights, kernels=False)

                def theirs(hidden: Tensor, weights: Tensor, twin: Any = twin) -> Any:
                    return twin(hidden, chosen, weights)

                if computes(theirs, plain, [hidden, weights], list(twin.parameters())):
                    return form
    return "its experts compute another function than gated MLPs and their weighted sum"


def _are_proportional(both: torch.Size, down: torch.Size, *, is_transposed: bool) -> bool:
    """Whether the first parameter has gate and up for the inputs of the second."""
    inner, width = (both[2], both[1]) if is_transposed else (both[1], both[2])
    out, taken = (down[2], down[1]) if is_transposed else (down[1], down[2])
    return inner == 2 * taken and width == out
