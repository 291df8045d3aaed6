"""AdamW whose two moments are kept in bf16 or in 8 bits: 4 or 2 bytes per element, where torch's has 8.

docs/precision.md has its costs. Weights, masters and gradients are the same as with torch's AdamW.

Outside the optimizer its state is torch's: `exp_avg` and `exp_avg_sq` in float32, with the shape of the weight. So
checkpoints do not depend on how state is kept, and can be loaded under another plan and with other `states`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.errors import ShardwiseError, nearest
from shardwise.kernels.compact_states import AdamWNumbers, Moments, adamw_step, decoded, make_moments, put

States = Literal["bf16", "8bit"]
_KEYS = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")


class CompactAdamW(Optimizer):
    """AdamW with state in 16 or 8 bits. Updates are elementwise; in 8 bits, 256 elements of a piece share a scale."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        states: States = "8bit",
    ) -> None:
        if states not in get_args(States):
            raise ShardwiseError(
                f"unknown optimizer states {states!r}",
                remedy=f"states={nearest(states, list(get_args(States))) or '8bit'!r}",
            )
        #: Not a setting of a group: loading a state does not change it.
        self.states: States = states
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @property
    def keeps_blocks(self) -> bool:
        """Whether state is of blocks: it can be cut and joined only as `portable_state`."""
        return self.states == "8bit"

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)
        return loss

    def _update(self, weight: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = torch.tensor(0.0, device="cpu")
            state.update(self._entries(make_moments(weight, bits=8 if self.keeps_blocks else 16)))
        state["step"] += 1
        beta1, beta2 = group["betas"]
        numbers = AdamWNumbers(
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=int(state["step"]),
        )
        adamw_step(weight, gradient, _moments(state), numbers)

    @torch.no_grad()
    def portable_state(self, weight: Tensor) -> dict[str, Any]:
        """Return the state that torch's AdamW would have for a weight."""
        state = self.state.get(weight)
        if not state:
            return {}
        first, second = decoded(_moments(state))
        return {"step": state["step"], "exp_avg": first, "exp_avg_sq": second}

    @torch.no_grad()
    def adopt_state(self, weight: Tensor, state: Mapping[str, Any]) -> None:
        """Set the state of a weight: from `portable_state`, or of torch's AdamW."""
        self.state.pop(weight, None)
        if "exp_avg" not in state or "exp_avg_sq" not in state:
            return
        home = state["exp_avg"].device
        moments = make_moments(torch.empty_like(weight, device=home), bits=8 if self.keeps_blocks else 16)
        step = torch.as_tensor(state.get("step", 0), dtype=torch.float32, device="cpu").clone()
        # Rounded as in its own step, so that loading twice gives the same bits.
        put(moments, state["exp_avg"].float(), state["exp_avg_sq"].float(), int(step))
        self.state[weight] = {"step": step, **self._entries(moments)}

    @staticmethod
    def _entries(moments: Moments) -> dict[str, Tensor]:
        return {key: each for key, each in zip(_KEYS, moments, strict=True) if each is not None}


def portable_state(optimizer: Optimizer, weight: Tensor) -> Mapping[str, Any]:
    """Return an optimizer's state of a weight in a form that can be cut, joined and saved."""
    return optimizer.portable_state(weight) if isinstance(optimizer, CompactAdamW) else optimizer.state.get(weight, {})


def adopt_state(optimizer: Optimizer, weight: Tensor, state: dict[str, Any]) -> None:
    """Set an optimizer's state of a weight, in the form that the optimizer keeps."""
    if isinstance(optimizer, CompactAdamW):
        optimizer.adopt_state(weight, state)
    else:
        optimizer.state[weight] = state


def check_on_host(optimizers: Iterable[Optimizer]) -> None:
    """Refuse states of blocks where states come from the host: what comes there is cut between any two numbers."""
    if any(isinstance(each, CompactAdamW) and each.keeps_blocks for each in optimizers):
        raise ShardwiseError(
            "states of 8 bits have a scale for each 256 numbers, and state on the host comes in pieces of any length",
            remedy="optimizer.states=bf16 (CompactAdamW(..., states='bf16')), or a plan without offload.optimizer and"
            " offload.parameters",
        )


def _moments(state: Mapping[str, Any]) -> Moments:
    return Moments(*(state.get(key) for key in _KEYS))  # type: ignore[arg-type]
