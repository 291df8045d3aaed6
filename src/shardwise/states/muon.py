"""Muon: orthogonalised momentum (Jordan et al. 2024).

Torch's own rounds to bf16 before it orthogonalises. This one computes in the precision of its parameters unless `dtype`
is given: then the same gradients, summed in another order, give the same weights up to the last few bits.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.errors import ShardwiseError

# The quintic of the paper: it maps singular values from 0 to 1 near 1 in five rounds.
_QUINTIC = (3.4445, -4.7750, 2.0315)


class Muon(Optimizer):
    """For matrices only: give embeddings, heads, norms and biases to another optimizer (`Share`).

    A step has length `lr` times the square root of rows over columns, if there are more rows. `dtype` is that of the
    orthogonalisation.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        num_rounds: int = 5,
        dtype: torch.dtype | None = None,
    ) -> None:
        settings = {
            "lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay,
            "num_rounds": num_rounds, "dtype": dtype,
        }  # fmt: skip
        super().__init__(params, settings)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() != 2:
                    raise ShardwiseError(
                        f"Muon works on matrices, and was given a parameter of shape {tuple(parameter.shape)}",
                        remedy="[Share(make=muon, takes=is_hidden_matrix), Share(make=adamw)]",
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        kept = state["momentum_buffer"]
        kept.lerp_(gradient, 1 - group["momentum"])
        direction = gradient.lerp(kept, group["momentum"]) if group["nesterov"] else kept
        orthogonal = orthogonalise(direction, group["num_rounds"], group["dtype"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        longer = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
        parameter.add_(orthogonal.to(parameter.dtype), alpha=-group["lr"] * longer)


def orthogonalise(matrix: Tensor, num_rounds: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """Return the nearest matrix whose singular values are all about 1, by Newton-Schulz iteration."""
    a, b, c = _QUINTIC
    flat = matrix.to(dtype or matrix.dtype)
    is_tall = flat.shape[0] > flat.shape[1]
    x = flat.T if is_tall else flat
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(num_rounds):
        gram = x @ x.T
        # a x + (b gram + c gram gram) x, as sums that are rounded once each.
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    found: Tensor = x.T if is_tall else x
    return found
