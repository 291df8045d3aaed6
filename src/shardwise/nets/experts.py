"""Many small MLPs, each for some of the rows."""

import torch
from torch import Tensor, nn

from shardwise.nets.feedforward import ACTIVATIONS
from shardwise.nets.settings import Activation


class Experts(nn.Module):
    """down(activation(gate) * up) of every expert, as three parameters of [experts, in, out].

    Rows come sorted by expert, `counts[expert]` of each, and all of them are somebody's. To shard by experts, cut the
    first dim of the parameters; to shard within each, the last of gate_proj and up_proj and the middle of down_proj.
    """

    def __init__(self, num_experts: int, width: int, inner: int, activation: Activation) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gate_proj = nn.Parameter(torch.empty(num_experts, width, inner))
        self.up_proj = nn.Parameter(torch.empty(num_experts, width, inner))
        self.down_proj = nn.Parameter(torch.empty(num_experts, inner, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in (self.gate_proj, self.up_proj, self.down_proj):
            nn.init.normal_(parameter, std=0.02)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        gate = grouped_matmul(rows, self.gate_proj, counts)
        inner = self.activation(gate) * grouped_matmul(rows, self.up_proj, counts)
        return grouped_matmul(inner, self.down_proj, counts)


def grouped_matmul(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply [rows, in], sorted by expert, with each one's [in, out]."""
    if rows.is_meta:
        return rows @ weights[0]  # Without numbers nobody knows whose a row is; the shape and the work are the same.
    if torch.is_autocast_enabled(rows.device.type):
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weights = rows.to(dtype), weights.to(dtype)
    if _has_kernel(rows, weights):
        return nn.functional.grouped_mm(rows, weights, offs=counts.cumsum(0).to(torch.int32))
    parts = torch.split(rows, counts.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights.unbind(), strict=True)])


def _has_kernel(rows: Tensor, weights: Tensor) -> bool:
    """Whether torch multiplies all groups at once: on Hopper and later, rows at multiples of 16 bytes."""
    return (
        rows.is_cuda
        and rows.dtype == weights.dtype == torch.bfloat16
        and all(size % 8 == 0 for size in weights.shape[1:])
        and torch.cuda.get_device_capability(rows.device) >= (9, 0)
    )
