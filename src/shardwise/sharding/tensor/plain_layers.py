"""Recognise plain layers: a matrix, a bias, and torch's own forward.

A layer that is cut is replaced, or gets another weight. Anything else attached to it (its own forward, hooks, small
matrices beside the large one) was written for the whole and would be lost. Such a layer stays whole, with the reason.
"""

from collections.abc import Iterator
from copy import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.torch_private import (
    accumulated_hooks,
    buffer_slots,
    gradient_hooks,
    hooks_of,
    parameter_slots,
)

_OWN = {"weight", "bias"}


def is_transposed(layer: nn.Module) -> bool:
    """Whether a layer is Hugging Face's Conv1D: a linear layer whose weight is stored as (inputs, outputs)."""
    return type(layer).__name__ == "Conv1D" and isinstance(getattr(layer, "nf", None), int)


def is_layer(module: nn.Module) -> bool:
    """Whether a module is of a type that may be cut."""
    return isinstance(module, (nn.Linear, nn.Embedding)) or is_transposed(module)


def why_whole(layer: nn.Module) -> str | None:
    """Return why a layer cannot be cut, whatever reads its channels; None if it can."""
    return next(_reasons(layer), None)


def _reasons(layer: nn.Module) -> Iterator[str]:
    if "forward" in vars(layer):
        yield "its forward was replaced by another function"
    if any(True for _ in layer.children()) or not isinstance(parameter_slots(layer).get("weight"), nn.Parameter):
        yield "its weight is computed in every forward (weight_norm, or another parametrization)"
    # A scalar buffer that scales an embedding's output does no harm.
    buffers = [key for key, each in buffer_slots(layer).items() if not (_is_embedding(layer) and each.dim() == 0)]
    more = [key for key in (*parameter_slots(layer), *buffers) if key not in _OWN]
    if more:
        yield f"it holds more than a weight and a bias: {', '.join(more)}"
    if not is_transposed(layer) and not _does_as_torch(layer):
        yield f"its forward is {type(layer).__name__}'s own"
    if isinstance(layer, nn.Embedding):
        yield from _reasons_of_embedding(layer)
    elif kinds := hooks_of(layer):
        yield f"it has a {kinds[0]} hook"
    for name, each in layer.named_parameters(recurse=False):
        if has_hooks(each):
            yield f"its {name} has a gradient hook"
        elif type(each) is not nn.Parameter:
            yield f"its {name} is a {type(each).__name__}"


def _is_embedding(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Embedding)


def _does_as_torch(layer: nn.Module) -> bool:
    """Whether a layer's forward is torch's or equivalent to it, backward included: tested on small matrices.

    The output of an embedding may be a multiple of torch's, as in Gemma.
    """
    torchs = nn.Embedding if _is_embedding(layer) else nn.Linear
    if (type(layer).forward, type(layer).__call__) == (torchs.forward, torchs.__call__):
        return True
    small = copy(layer)
    slots, bias = dict(parameter_slots(layer)), None
    weight = nn.Parameter(torch.arange(30.0).cos().view(6, 5))
    sizes = {"in_features": 5, "out_features": 6, "num_embeddings": 6, "embedding_dim": 5, "padding_idx": None}
    small.__dict__ = {**vars(layer), **sizes, "_parameters": slots}
    slots["weight"] = weight
    if slots.get("bias") is not None:
        slots["bias"] = bias = nn.Parameter(torch.arange(6.0).sin())
    given = torch.arange(10).view(2, 5) % 6 if _is_embedding(layer) else torch.arange(10.0).sin().view(2, 5)
    plain = functional.embedding(given, weight) if _is_embedding(layer) else functional.linear(given, weight, bias)
    try:
        with torch.enable_grad():
            made = type(layer).forward(small, given)
            scale = (
                float((made * plain).detach().sum() / (plain * plain).detach().sum()) if _is_embedding(layer) else 1.0
            )
            slope = torch.arange(float(plain.numel())).cos().view_as(plain)
            found, expected = (torch.autograd.grad((each * slope).sum(), weight)[0] for each in (made, plain))
    except Exception:
        return False
    return torch.allclose(made, scale * plain, atol=1e-4) and torch.allclose(found, scale * expected, atol=1e-4)


def _reasons_of_embedding(layer: nn.Embedding) -> Iterator[str]:
    if layer.max_norm is not None:
        yield "max_norm is of whole rows"
    if layer.scale_grad_by_freq:
        yield "scale_grad_by_freq counts the words of a whole batch"
    if layer.sparse:
        yield "its gradients are sparse"


def has_hooks(parameter: Tensor) -> bool:
    """Whether a parameter has gradient hooks, which would receive only a piece of the gradient."""
    return bool(gradient_hooks(parameter) or accumulated_hooks(parameter))


def keep_attributes(layer: nn.Module, made: nn.Module) -> None:
    """Copy a user's attributes from a layer to its replacement."""
    for key, value in vars(layer).items():
        if key not in vars(made) and not key.startswith("_"):
            setattr(made, key, value)
