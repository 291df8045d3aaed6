"""Keys and values of earlier tokens (KV cache), so that each new token costs the work of one token."""

import torch
from torch import Tensor


class Cache:
    """Grows with the tokens. Each layer has two tensors, whose second last dim is tokens."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def num_tokens(self) -> int:
        return next(iter(self._held.values()))[0].shape[-2] if self._held else 0

    def extend(self, layer: int, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Add a layer's new tokens and return all of them."""
        if layer in self._held:
            before = self._held[layer]
            first, second = torch.cat((before[0], first), dim=-2), torch.cat((before[1], second), dim=-2)
        self._held[layer] = first, second
        return first, second
