"""The dense layer between attentions."""

from torch import Tensor, nn

from shardwise.kernels.gated import ACTIVATIONS, gated
from shardwise.nets.settings import Mlp


class FeedForward(nn.Module):
    """down(activation(gate) * up), as in SwiGLU; or down(activation(up)) without a gate, as in GPT-2."""

    def __init__(self, width: int, mlp: Mlp) -> None:
        super().__init__()
        self.activation, self.kernels = mlp.activation, True
        self.gate_proj = nn.Linear(width, mlp.width, bias=mlp.bias) if mlp.gated else None
        self.up_proj = nn.Linear(width, mlp.width, bias=mlp.bias)
        self.down_proj = nn.Linear(mlp.width, width, bias=mlp.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        up: Tensor = self.up_proj(hidden)
        if self.gate_proj is None:
            inner = ACTIVATIONS[self.activation](up)
        else:
            inner = gated(self.gate_proj(hidden), up, self.activation, kernels=self.kernels)
        projected: Tensor = self.down_proj(inner)
        return projected
