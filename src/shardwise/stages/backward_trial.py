"""Find a backward that is not linear in its initial gradient: hooks that clamp, functions that normalise.

Parts of a batch (replicas, microbatches, parts of sequences) begin their backward with another gradient than the whole
batch does, and their sum is scaled at the end. That is correct as long as twice the gradient above gives twice the
gradient below. This holds for all of torch's own operations, but not necessarily for a user's hooks and functions.
These may also mix rows that the forward does not, for which gradients of parts are compared (`slope_trial.py`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from shardwise.stages.gradient_products import products_of
from shardwise.stages.split.names_reached import names_reached
from shardwise.torch_private import PythonNode, function_of, hooks_of

#: Gradients are compared for initial gradients of 1 and of this. A power of two does not change the mantissa.
_FACTOR = -(2.0**16)
#: Names that make values constant for autograd; and the size above which a module is not tried, as that takes a
#: backward.
_CONSTANT, _MANY = frozenset({"detach", "detach_", "no_grad"}), 2**27


class SeenHooks(TorchFunctionMode):
    """Records whether a forward registers hooks on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.are_there = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        self.are_there = self.are_there or func is Tensor.register_hook
        return func(*args, **(kwargs or {}))


def users_part(module: nn.Module, loss: Tensor, hooks: SeenHooks) -> list[str]:
    """Describe the user's code that takes part in the backward of a loss."""
    if loss.grad_fn is None:
        return []
    names = [name for name, each in module.named_modules() if any("backward" in kind for kind in hooks_of(each))]
    found = [f"a backward hook of {each}" for each in names]
    found += [f"{each}.backward" for each in _functions_below(loss.grad_fn)]
    return found + (["a hook of a tensor in the forward"] if hooks.are_there else [])


def makes_constants(module: nn.Module, loss: Any) -> bool:
    """Whether a forward or a loss names what makes numbers constants to autograd."""
    is_small = sum(each.numel() for each in module.parameters()) <= _MANY
    return is_small and not names_reached(module, loss).isdisjoint(_CONSTANT)


def asks_for_mode(loss: Any) -> bool:
    """Whether a loss asks if gradients are on: it may do more in training."""
    return "is_grad_enabled" in names_reached(loss)


def gradients_told(module: nn.Module, loss: Tensor) -> dict[str, tuple[float, float]]:
    """For parameters by name: a product of the gradient, and the magnitude that rounding is relative to."""
    found = products_of(loss, module)
    if found is None:
        return {}
    return dict(zip(found.names, zip(found.products.tolist(), found.sizes.tolist(), strict=True), strict=True))


def find_bent(module: nn.Module, loss: Tensor, whose: Sequence[str]) -> str | None:
    """Describe a nonlinearity of the backward; None if there is none. It runs only if user code takes part."""
    if not whose:
        return None
    parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
    plain, scaled = (_gradients(loss, list(parameters.values()), factor) for factor in (1.0, _FACTOR))
    for name, one, other in zip(parameters, plain, scaled, strict=True):
        if one is not None and other is not None and not _are_in_proportion(one, other):
            return (
                f"the backward is not in proportion to the gradient that it begins with: {_FACTOR:g} times the gradient"
                f" of the loss gives another multiple of the gradient of {name} ({' or '.join(whose[:3])}), and parts"
                " of a batch begin with other gradients than the whole"
            )
    return None


def _gradients(loss: Tensor, parameters: list[nn.Parameter], factor: float) -> Sequence[Tensor | None]:
    start = torch.full_like(loss, factor)
    return torch.autograd.grad(loss, parameters, start, retain_graph=True, allow_unused=True)


@torch.no_grad()
def is_linear(hooks: list[Any], parameter: nn.Parameter) -> bool:
    """Whether hooks of a gradient make of a sum what they make of its parts, tried on numbers."""
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(parameter.shape, generator=generator).to(parameter.dtype) for _ in range(2))
    if not parameter.is_meta:
        one, other = one.to(parameter.device), other.to(parameter.device)

    def applied(gradient: Tensor) -> Tensor | None:
        made: Tensor | None = gradient
        for hook in hooks:
            made = None if made is None else hook(made)
        return made  # None: the hook only reads its gradient, and would see that of some rows.

    both, first, second, twice = (applied(each) for each in (one + other, one.clone(), other.clone(), -2 * one))
    if both is None or first is None or second is None or twice is None:
        return False
    near = 1e-2 if parameter.itemsize < 4 else 1e-4
    return torch.allclose(both, first + second, near, near) and torch.allclose(twice, -2 * first, near, near)


def _functions_below(root: Node) -> list[str]:
    """Return the names of the user's own autograd functions in a graph."""
    seen, found, stack = {root}, {}, [root]
    while stack:
        node = stack.pop()
        if isinstance(node, PythonNode):
            function = function_of(node)
            if not getattr(function, "__module__", "").startswith("shardwise."):
                found[getattr(function, "__qualname__", node.name())] = True
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return list(found)


def _are_in_proportion(one: Tensor, other: Tensor) -> bool:
    """Whether gradients are proportional, up to rounding and the order of sums, which threads may change."""
    wanted, found = one.double() * _FACTOR, other.double()
    near = 1e-4 if one.itemsize >= 4 else 2e-2
    most = near * wanted.abs().max() if wanted.numel() else torch.zeros(())
    return not bool(((wanted - found).abs() > most).any())
