"""Several linear layers of one input as one product.

    x ── [Wq; Wk; Wv]^T ── q | k | v

One large product has less of a last, half-filled wave of tiles than three, and its gradient of the input is one product
instead of three and two sums. Weights stay apart: the compiler writes them side by side for each step, which is 1 % of
the time that a product of 16,384 tokens takes.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from shardwise.torch_private import hooks_of

#: With fewer tokens, to write the weights side by side costs more than is won.
LEAST_TOKENS = 2048


def linear_layers(x: Tensor, *layers: nn.Linear, kernels: bool = True) -> tuple[Tensor, ...]:
    """What each layer makes of x. Layers that are more than a product (cut, hooked, of a subclass) are called."""
    if not (kernels and _pays(x) and all(map(_is_plain, layers))):
        return tuple(layer(x) for layer in layers)
    weights: list[Tensor] = [layer.weight for layer in layers]
    biases = [each for each in map(_bias, layers) if each is not None]
    if biases and len(biases) < len(layers):
        return tuple(layer(x) for layer in layers)
    joined = linear(x, torch.cat(weights), torch.cat(biases) if biases else None)
    return torch.split(joined, [each.shape[0] for each in weights], -1)


def _bias(layer: nn.Linear) -> Tensor | None:
    return layer.bias


def _pays(x: Tensor) -> bool:
    is_large = x.numel() // x.shape[-1] >= LEAST_TOKENS
    return torch.compiler.is_compiling() and is_large and torch.is_grad_enabled()


def _is_plain(layer: nn.Linear) -> bool:
    return type(layer) is nn.Linear and not hooks_of(layer) and "forward" not in layer.__dict__
