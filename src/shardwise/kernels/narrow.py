"""Quantised ("narrow") weights: how they are stored. Products that read them directly: `row_linear`, `few_rows_linear`.

    fp8    8 bits per weight (e4m3), and one float32 scale for each row of outputs
    int4   4 bits per weight, and for each group of 64 along the inputs a scale and a lowest value, of 16 bits each: in
           bfloat16 if the weights are, because then kernels multiply in that

Codes are packed in words of 32 bits; each run of 128 inputs of a row shares its words. One position (the same bits) of
consecutive words holds consecutive inputs. So a kernel reads whole words, and multiplies one position with a contiguous
part of its input.

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
#: Bits per weight.
BITS = {"fp8": 8, "int4": 4}
#: Inputs that share a scale in 4 bits, and inputs that share words.
GROUP, RUN = 64, 128
_LARGEST_FP8 = 448.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowWeight:
    """A quantised weight, [..., outputs, inputs]. `dtype` is the one it is multiplied in."""

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
        """Whether kernels support it: from Hopper on. Older GPUs cannot convert e4m3, or overlap kernels."""
        lies = self.codes.is_contiguous() and self.scales.is_contiguous()
        return lies and (not is_on_gpu(self.codes) or overlapping(self.codes.device)["OVERLAPS"])

    def wide(self) -> Tensor:
        """Return the dequantised weight, by the definition. `widen` may use a kernel."""
        codes = _unpacked(self.codes, BITS[self.kind])
        if self.kind == "fp8":
            made = codes.view(torch.float8_e4m3fn).float() * self.scales[..., None]
        else:
            steps = codes.view(*codes.shape[:-1], -1, GROUP).float()
            made = (steps * self.scales[..., :1].float() + self.scales[..., 1:].float()).flatten(-2)
        return made[..., : self.inputs].to(self.dtype)


def make_narrow(weight: Tensor, kind: str) -> NarrowWeight:
    """Quantise a weight, rounding to nearest."""
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
    """Pack codes, [..., inputs] in bytes, into words."""
    places = codes.view(*codes.shape[:-1], -1, 32 // bits, RUN * bits // 32)
    if bits == 4:
        places = places[..., ::2, :] | places[..., 1::2, :] << 4
    return places.transpose(-1, -2).contiguous().view(torch.int32).flatten(-3)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack words into codes."""
    places = words.view(*words.shape[:-1], -1, RUN * bits // 32, 1).view(torch.uint8).transpose(-1, -2)
    if bits == 4:
        places = torch.stack((places & 15, places >> 4), dim=-2).flatten(-3, -2)
    return places.flatten(-3)
