"""Rotary positions (Su et al. 2021), and their scaling beyond the training length."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.kernels.rotary import rotate_plain
from shardwise.nets.settings import Divided, Linear, Llama3, Rope, Yarn

#: Cosines and sines, each [batch, tokens, half of the rotated dim].
Rotation = tuple[Tensor, Tensor]


class Rotary(nn.Module):
    """Maps positions to rotations. It has no weights, so every pipeline stage may have its own."""

    frequencies: Tensor

    def __init__(self, rope: Rope, dim: int) -> None:
        super().__init__()
        self.rope, self.dim = rope, dim
        self.scale = magnitude_of(rope)
        frequencies, device = frequencies_of(rope, dim), torch.get_default_device()
        # Not on the meta device: nothing would compute their values later.
        self.register_buffer("frequencies", frequencies if device.type == "meta" else frequencies.to(device), False)

    def reset_parameters(self) -> None:
        """Compute frequencies that have memory but no values."""
        self.frequencies.copy_(frequencies_of(self.rope, self.dim))

    def forward(self, positions: Tensor) -> Rotation:
        angles = positions[..., None].float() * self.frequencies.to(positions.device)
        return angles.cos() * self.scale, angles.sin() * self.scale

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Rotary":
        # Recomputed: casting to bfloat16, or emptying on the way from the meta device, would destroy the frequencies.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.frequencies = frequencies_of(self.rope, self.dim).to(self.frequencies.device)
        return self


def rotate(heads: Tensor, rotation: Rotation, *, interleaved: bool) -> Tensor:
    """Rotate [batch, heads, tokens, dim]. Pairs come out half a head apart, also if they came in interleaved. That does
    not change products of queries and keys."""
    return rotate_plain(heads, *rotation, interleaved=interleaved)


def frequencies_of(rope: Rope, dim: int) -> Tensor:
    """Return the radians per token of each pair. Computed on the CPU in float32: the same values on every device."""
    even = torch.arange(0, dim, 2, device="cpu", dtype=torch.float32)
    frequencies: Tensor = 1.0 / rope.theta ** (even / dim)
    if isinstance(rope.scaling, Linear):
        return frequencies / rope.scaling.factor
    if isinstance(rope.scaling, Divided):
        return frequencies / torch.tensor(rope.scaling.by, device="cpu")
    if isinstance(rope.scaling, Llama3):
        return _llama3(frequencies, rope.scaling)
    if isinstance(rope.scaling, Yarn):
        return _yarn(frequencies, rope.scaling, rope.theta, dim)
    return frequencies


def magnitude_of(rope: Rope) -> float:
    """Return the factor on cosines and sines: YaRN's temperature, half of it on each side of the product."""
    yarn = rope.scaling
    if not isinstance(yarn, Yarn):
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.magnitude and yarn.magnitude_all:
        return _sharpness(yarn.factor, yarn.magnitude) / _sharpness(yarn.factor, yarn.magnitude_all)
    return _sharpness(yarn.factor, 1.0)


def latent_magnitude_of(rope: Rope) -> float:
    """Return DeepSeek's additional factor on the logits of latent attention: for whole heads, not their rotated
    part."""
    yarn = rope.scaling
    if not isinstance(yarn, Yarn) or not yarn.magnitude_all:
        return 1.0
    return _sharpness(yarn.factor, yarn.magnitude_all) ** 2


def _sharpness(factor: float, magnitude: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * magnitude * math.log(factor) + 1.0


def _llama3(frequencies: Tensor, scaling: Llama3) -> Tensor:
    turns = scaling.original_length * frequencies / (2 * math.pi)
    kept = ((turns - scaling.low_turns) / (scaling.high_turns - scaling.low_turns)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn(frequencies: Tensor, scaling: Yarn, theta: float, dim: int) -> Tensor:
    def pair_of(turns: float) -> float:
        """Return the pair that turns this many times in the original length: theta^(2 pair / dim) solved for the
        pair."""
        return dim * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(scaling.fast_turns), pair_of(scaling.slow_turns)
    if scaling.rounded:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # A step instead of a ramp.
    pairs = torch.arange(dim // 2, device="cpu", dtype=torch.float32)
    stretched = ((pairs - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling.factor * stretched + frequencies * (1 - stretched)
