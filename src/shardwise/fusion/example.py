"""A small copy of a module with random weights, and a test whether two functions agree on a small example."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

#: The tolerance for float32 sums of a few thousand numbers in another order.
_CLOSE = 2e-4


def kind_of(module: nn.Module) -> tuple[Any, ...]:
    """Return what modules of one kind have in common: class, settings, shapes. One of each kind is tried."""
    plain = (bool, int, float, str, type(None))
    settings = tuple(
        (key, each if isinstance(each, plain) else repr(each) if isinstance(each, (tuple, list)) else id(each))
        for key, each in sorted(vars(module).items())
        if not key.startswith("_") and key not in ("training", "layer_idx", "layer_id")
    )
    shapes = tuple((key, tuple(each.shape)) for key, each in module.named_parameters(recurse=False))
    below = tuple((key, kind_of(each)) for key, each in module.named_children())
    return type(module), settings, shapes, below


def small_copy(
    module: nn.Module,
    shapes: Mapping[str, Sequence[int]] | None = None,
    children: Mapping[str, nn.Module] | None = None,
) -> nn.Module:
    """Return a copy on the CPU in float32, in training mode, with random parameters and floating buffers.

    `shapes` are other shapes for some parameters, and `children` replace some submodules.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    memo: dict[int, Any] = {id(module.get_submodule(name)): each for name, each in (children or {}).items()}
    replaced = [id(each) for name in children or {} for each in module.get_submodule(name).parameters()]
    for name, each in (*module.named_parameters(), *module.named_buffers()):
        if id(each) in replaced or not each.is_floating_point():
            continue
        numbers = torch.randn(tuple((shapes or {}).get(name, each.shape)), generator=generator, device="cpu")
        memo[id(each)] = nn.Parameter(numbers) if isinstance(each, nn.Parameter) else numbers
    config = getattr(module, "config", None)
    if config is not None:
        memo[id(config)] = config  # Shared: it is only read, and large.
    return copy.deepcopy(module, memo).train()


def small_linear(inputs: int, outputs: int, *, bias: bool) -> nn.Linear:
    with torch.device("cpu"):
        made = nn.Linear(inputs, outputs, bias=bias, dtype=torch.float32)
    generator = torch.Generator("cpu").manual_seed(inputs * 31 + outputs)
    with torch.no_grad():
        for each in made.parameters():
            each.copy_(torch.randn(each.shape, generator=generator, device="cpu"))
    return made


def computes(
    one: Callable[..., Any], other: Callable[..., Any], given: Sequence[Tensor], parameters: Sequence[Tensor]
) -> bool:
    """Whether two functions of tensors give the same outputs, and the same gradients of `given` and of parameters."""
    try:
        found, wanted = _outcome(one, given, parameters), _outcome(other, given, parameters)
    except Exception:  # A module may raise anything for inputs that it is not made for.
        return False
    return len(found) == len(wanted) and all(map(_are_alike, found, wanted))


def _outcome(function: Callable[..., Any], given: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    with torch.enable_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        inputs = [each.detach().clone().requires_grad_(each.is_floating_point()) for each in given]
        made = function(*inputs)
        outputs = list(made) if isinstance(made, tuple) else [made]
        wanted = [each for each in (*inputs, *parameters) if each.requires_grad]
        generator = torch.Generator("cpu").manual_seed(1)
        incoming = [torch.randn(each.shape, generator=generator, device="cpu") for each in outputs]
        gradients = torch.autograd.grad(outputs, wanted, incoming, allow_unused=True)
    found: list[Tensor | None] = [*outputs, *gradients]
    return [each.detach() for each in found if each is not None]


def _are_alike(found: Tensor, wanted: Tensor) -> bool:
    """Compare row by row: rows of an example differ in size by orders of magnitude."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    apart, size = (found - wanted).norm(dim=-1), wanted.norm(dim=-1)
    return bool((apart <= _CLOSE * size + 1e-30).all())
