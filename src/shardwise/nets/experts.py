"""Many small MLPs, each for some of the rows."""

import torch
from torch import Tensor, nn

from shardwise.kernels.experts import grouped_matmul
from shardwise.kernels.gated import gated
from shardwise.nets.settings import Activation


class Experts(nn.Module):
    """Compute down(activation(gate) * up) of every expert, with three parameters of [experts, in, out].

    Rows are sorted by expert, `counts[expert]` of each, and every row has an expert. To shard by experts, cut the first
    dim of the parameters; to shard within each, cut the last of gate_proj and up_proj and the middle of down_proj.
    """

    def __init__(self, num_experts: int, width: int, inner: int, activation: Activation) -> None:
        super().__init__()
        self.activation, self.kernels = activation, True
        self.gate_proj = nn.Parameter(torch.empty(num_experts, width, inner))
        self.up_proj = nn.Parameter(torch.empty(num_experts, width, inner))
        self.down_proj = nn.Parameter(torch.empty(num_experts, inner, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in (self.gate_proj, self.up_proj, self.down_proj):
            nn.init.normal_(parameter, std=0.02)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        gate = grouped_matmul(rows, self.gate_proj, counts)
        inner = gated(gate, grouped_matmul(rows, self.up_proj, counts), self.activation, kernels=self.kernels)
        return grouped_matmul(inner, self.down_proj, counts)
