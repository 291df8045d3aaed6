"""Weights in fewer bits: how they are kept. Products that read them so: `row_linear`, `few_rows_linear`.

    fp8    8 bits a weight (e4m3), and one scale, float32, for each row of outputs
    int4   4 bits a weight, and for each 64 of them along the inputs a scale and a lowest value, of 16 bits each: in
           bfloat16 for weights that are, whose programs multiply in that

They lie in words of 32 bits, and each 128 inputs of a row share theirs. What is at one place of all these words are
inputs that lie one behind the other: a program reads whole words, and multiplies what is at a place with what is given
to those inputs as it lies.

    word              0           1      ..                  0          1      ..
    fp8   bits 0-7    input 0     1      .. 31   int4  0-3   input 0    1      .. 15
          bits 8-15   input 32    33     .. 63         4-7   input 16   17     .. 31
          ..                                           ..
          bits 24-31  input 96    97     .. 127        28-31 input 112  113    .. 127
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardwise.kernels.launch import is_on_gpu, overlapping

KINDS = ("fp8", "int4")
#: Bits of a weight.
BITS = {"fp8": 8, "int4": 4}
#: Inputs that share a scale in 4 bits, and inputs that share words.
GROUP, RUN = 64, 128
_LARGEST_FP8 = 448.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowWeight:
    """A weight, [..., outputs, inputs], in fewer bits. `dtype` is what it is multiplied in."""

    kind: str
    #: [..., outputs, words].
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
        return lies and (not is_on_gpu(self.codes) or overlapping(self.codes.device)["OVERLAPS"])

    def wide(self) -> Tensor:
        """The weight as it is multiplied with: the definition. `widen` may have a kernel for it."""
        codes = _unpacked(self.codes, BITS[self.kind])
        if self.kind == "fp8":
            made = codes.view(torch.float8_e4m3fn).float() * self.scales[..., None]
        else:
            steps = codes.view(*codes.shape[:-1], -1, GROUP).float()
            made = (steps * self.scales[..., :1].float() + self.scales[..., 1:].float()).flatten(-2)
        return made[..., : self.inputs].to(self.dtype)


def make_narrow(weight: Tensor, kind: str) -> NarrowWeight:
    """Rounded to the nearest."""
    inputs, dtype = weight.shape[-1], weight.dtype
    wide = pad(weight.float(), (0, -inputs % RUN))
    if kind == "fp8":
        scales = weight.abs().amax(-1).float().clamp_min(1e-12) / _LARGEST_FP8
        codes = (wide / scales[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        groups = wide.view(*weight.shape[:-1], -1, GROUP)
        kept = dtype if dtype.itemsize == 2 else torch.float16
        low, high = groups.amin(-1, keepdim=True).to(kept), groups.amax(-1, keepdim=True)
        step = ((high - low.float()) / 15).clamp_min(1e-7).to(kept)
        codes = ((groups - low.float()) / step.float()).round().clamp(0, 15).to(torch.uint8).flatten(-2)
        scales = torch.cat((step, low), -1)
    return NarrowWeight(kind=kind, codes=_packed(codes, BITS[kind]), scales=scales, inputs=inputs, dtype=dtype)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Codes, [..., inputs] of a byte each, in words."""
    places = codes.view(*codes.shape[:-1], -1, 32 // bits, RUN * bits // 32)
    if bits == 4:
        places = places[..., ::2, :] | places[..., 1::2, :] << 4
    return places.transpose(-1, -2).contiguous().view(torch.int32).flatten(-3)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """The other way round."""
    places = words.view(*words.shape[:-1], -1, RUN * bits // 32, 1).view(torch.uint8).transpose(-1, -2)
    if bits == 4:
        places = torch.stack((places & 15, places >> 4), dim=-2).flatten(-3, -2)
    return places.flatten(-3)
