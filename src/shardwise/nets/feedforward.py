"""The dense layer between attentions."""

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn
from torch.nn import functional

from shardwise.nets.settings import Activation, Mlp

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


class FeedForward(nn.Module):
    """down(activation(gate) * up), as in SwiGLU; or down(activation(up)) without a gate, as in GPT-2."""

    def __init__(self, width: int, mlp: Mlp) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[mlp.activation]
        self.gate_proj = nn.Linear(width, mlp.width, bias=mlp.bias) if mlp.gated else None
        self.up_proj = nn.Linear(width, mlp.width, bias=mlp.bias)
        self.down_proj = nn.Linear(mlp.width, width, bias=mlp.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        up: Tensor = self.up_proj(hidden)
        inner = self.activation(up) if self.gate_proj is None else self.activation(self.gate_proj(hidden)) * up
        projected: Tensor = self.down_proj(inner)
        return projected
