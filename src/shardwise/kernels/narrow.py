"""Weights in fewer bits: how they are kept. Products that read them so: `row_linear`, `few_rows_linear`.

    fp8    8 bits a weight (e4m3), and one scale, float32, for each row of outputs
    int4   4 bits a weight, and for each 64 of them along the inputs a scale and a lowest value, of 16 bits each

Two groups of 4 bits share their bytes. So a run of bytes has, of its low bits and of its high bits, inputs that lie one
behind the other and have one scale in a row: a program multiplies with either half as it lies.

    byte        0            1        ..     63
    low bits    input 0      input 1  ..     input 63     the first scale and lowest value
    high bits   input 64     input 65 ..     input 127    the second ones
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardwise.kernels.launch import overlapping

KINDS = ("fp8", "int4")
#: Inputs that share a scale in 4 bits, and inputs that share bytes.
GROUP, PAIR = 64, 128
_LARGEST_FP8 = 448.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowWeight:
    """A weight, [..., outputs, inputs], in fewer bits. `dtype` is what it is multiplied in."""

    kind: str
    #: [..., outputs, inputs] in fp8, [..., outputs, bytes] in 4 bits.
    codes: Tensor
    #: [..., outputs] in fp8; in 4 bits [..., outputs, groups, 2], scales and lowest values.
    scales: Tensor
    inputs: int
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.codes.shape[:-1], self.inputs))

    def has_kernels(self) -> bool:
        """From Hopper on: older GPUs convert no e4m3, or overlap no kernels. They have the definition."""
        lies = self.codes.is_contiguous() and self.scales.is_contiguous()
        return lies and (not self.codes.is_cuda or overlapping(self.codes.device)["OVERLAPS"])

    def wide(self) -> Tensor:
        """The weight as it is multiplied with: the definition. `widen` may have a kernel for it."""
        if self.kind == "fp8":
            return (self.codes.float() * self.scales[..., None]).to(self.dtype)
        pairs = self.codes.view(*self.codes.shape[:-1], -1, GROUP)
        steps = torch.stack((pairs & 15, pairs >> 4), dim=-2).flatten(-3, -2)
        made = steps.float() * self.scales[..., :1].float() + self.scales[..., 1:].float()
        return made.flatten(-2)[..., : self.inputs].to(self.dtype)


def bytes_of(kind: str) -> float:
    """Of one weight, the scales of 4 bits among them; one for a whole row is next to nothing."""
    return 1.0 if kind == "fp8" else 0.5 + 2 * 2 / GROUP


def make_narrow(weight: Tensor, kind: str) -> NarrowWeight:
    """Rounded to the nearest."""
    inputs, dtype = weight.shape[-1], weight.dtype
    if kind == "fp8":
        scales = weight.abs().amax(-1).float().clamp_min(1e-12) / _LARGEST_FP8
        codes = (weight.float() / scales[..., None]).to(torch.float8_e4m3fn)
        return NarrowWeight(kind=kind, codes=codes.contiguous(), scales=scales, inputs=inputs, dtype=dtype)
    groups = pad(weight.float(), (0, -inputs % PAIR))
    groups = groups.view(*weight.shape[:-1], -1, GROUP)
    low, high = groups.amin(-1, keepdim=True).half(), groups.amax(-1, keepdim=True)
    scales = ((high - low.float()) / 15).clamp_min(1e-7).half()
    steps = ((groups - low.float()) / scales.float()).round().clamp(0, 15).to(torch.uint8)
    codes = (steps[..., ::2, :] | steps[..., 1::2, :] << 4).flatten(-2)
    return NarrowWeight(kind=kind, codes=codes, scales=torch.cat((scales, low), -1), inputs=inputs, dtype=dtype)
