"""Weights in fewer bits: what layers multiply with is kept narrow and made wide when it is used.

    fp8    8 bits a weight (e4m3), and one scale for each row of outputs
    int4   4 bits a weight, and for each 64 of them along the inputs a scale and a lowest value, of 16 bits each

Activations, embeddings, norms, biases and the head stay as they are. These are the plain definitions: what they give is
what a kernel has to give.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.errors import ShardwiseError, unknown
from shardwise.nets.experts import Experts
from shardwise.nets.transformer import Transformer

KINDS = ("fp8", "int4")
_LARGEST_FP8 = 448.0
_GROUP = 64


class Narrow(nn.Module):
    """One weight, [..., inputs], narrow. `wide` gives it back as the layer multiplies with it."""

    codes: Tensor
    scales: Tensor
    lows: Tensor

    def __init__(self, weight: Tensor, kind: str) -> None:
        super().__init__()
        self.kind, self.shape, self.dtype = kind, weight.shape, weight.dtype
        if kind == "fp8":
            scales = weight.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / _LARGEST_FP8
            self.register_buffer("codes", (weight.float() / scales).to(torch.float8_e4m3fn))
            self.register_buffer("scales", scales)
            return
        groups = functional.pad(weight.float(), (0, -weight.shape[-1] % _GROUP))
        groups = groups.view(*weight.shape[:-1], -1, _GROUP)
        low, high = groups.amin(-1, keepdim=True).half(), groups.amax(-1, keepdim=True)
        scales = ((high - low.float()) / 15).clamp_min(1e-7).half()
        steps = ((groups - low.float()) / scales.float()).round().clamp(0, 15).to(torch.uint8)
        self.register_buffer("codes", steps[..., ::2] | steps[..., 1::2] << 4)
        self.register_buffer("scales", scales)
        self.register_buffer("lows", low)

    def wide(self) -> Tensor:
        if self.kind == "fp8":
            return (self.codes.float() * self.scales).to(self.dtype)
        steps = torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(-2)
        made = steps.float() * self.scales.float() + self.lows.float()
        return made.flatten(-2)[..., : self.shape[-1]].to(self.dtype)


class NarrowLinear(nn.Module):
    """A linear layer whose weight is narrow."""

    def __init__(self, linear: nn.Linear, kind: str) -> None:
        super().__init__()
        self.narrow, self.bias = Narrow(linear.weight.data, kind), linear.bias

    @property
    def weight(self) -> Tensor:
        return self.narrow.wide()

    def forward(self, given: Tensor) -> Tensor:
        return functional.linear(given, self.weight, self.bias)


class NarrowExperts(nn.Module):
    """Experts whose three weights, [experts, in, out], are narrow along their inputs."""

    def __init__(self, experts: Experts, kind: str) -> None:
        super().__init__()
        self.activation, self.kernels = experts.activation, experts.kernels
        weights = (experts.gate_proj, experts.up_proj, experts.down_proj)
        self.gate, self.up, self.down = (Narrow(each.data.transpose(1, 2), kind) for each in weights)

    gate_proj = property(lambda self: self.gate.wide().transpose(1, 2))
    up_proj = property(lambda self: self.up.wide().transpose(1, 2))
    down_proj = property(lambda self: self.down.wide().transpose(1, 2))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        return Experts.forward(self, rows, counts)  # type: ignore[arg-type]


def check_kind(kind: str | None) -> None:
    """Refuse a name that is not known, and devices that it was not tried on."""
    if kind is None:
        return
    if kind not in KINDS:
        raise unknown("weights", kind, KINDS)
    if torch.cuda.is_available():
        raise ShardwiseError(
            f"--weights {kind} computes on processors alone so far: its kernels are missing",
            remedy="no --weights; or CUDA_VISIBLE_DEVICES= to serve on CPUs",
        )


@torch.no_grad()
def narrow(model: Transformer, kind: str | None) -> None:
    """Make the weights of all layers narrow, in place. What a rank does not have (on the meta device) stays there."""
    if kind is None:
        return
    for module in [each for layer in model.layers for each in layer.modules()]:
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and not child.weight.is_meta:
                setattr(module, name, NarrowLinear(child, kind))
            elif isinstance(child, Experts) and not child.gate_proj.is_meta:
                setattr(module, name, NarrowExperts(child, kind))


def num_parameters(model: nn.Module) -> int:
    """Of all weights that are here, narrow ones by their number."""
    plain = sum(each.numel() for each in model.parameters() if not each.is_meta)
    return plain + sum(each.shape.numel() for each in model.modules() if isinstance(each, Narrow))


def weight_bytes(model: nn.Module) -> int:
    return sum(
        each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers()) if not each.is_meta
    )
