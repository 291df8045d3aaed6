"""Choose the experts of each token, and their weights."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from shardwise.kernels.experts import route
from shardwise.nets.settings import Mixture


class Choice(NamedTuple):
    """The experts of each token and their weights, both [tokens, chosen]; and all scores, [tokens, experts]."""

    experts: Tensor
    weights: Tensor
    scores: Tensor


class Router(nn.Module):
    """Scores from one matrix, always in float32: rounding a score would send a token to another expert."""

    correction: Tensor | None
    load: Tensor

    def __init__(self, width: int, mixture: Mixture) -> None:
        super().__init__()
        self.mixture, self.kernels = mixture, True
        self.weight = nn.Parameter(torch.empty(mixture.num_experts, width))
        #: Added to scores for the choice only. It gets no gradient: `balance.py` moves it.
        self.register_buffer("correction", torch.empty(mixture.num_experts) if mixture.correction else None)
        #: The number of tokens of each expert in training, since `balance.py` last read it.
        self.register_buffer("load", torch.empty(mixture.num_experts, dtype=torch.int64), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.load)
        if self.correction is not None:
            nn.init.zeros_(self.correction)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Router":
        # The correction moves by thousandths, which bfloat16 cannot represent, so casting the module does not cast it.
        before = self.correction
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if before is not None and self.correction is not None and self.correction.dtype != before.dtype:
            self.correction = before.to(self.correction.device)
        return self

    def forward(self, tokens: Tensor) -> Choice:
        mixture = self.mixture
        with _plain_precision(tokens.device):
            logits = linear(tokens.float(), self.weight.float())
        scores = logits.sigmoid() if mixture.scores == "sigmoid" else logits.softmax(-1)
        if mixture.num_chosen_groups == mixture.num_groups:
            how: dict[str, Any] = {"scores": mixture.scores, "normalised": mixture.normalised, "scale": mixture.scale}
            weights, experts = route(
                logits, mixture.num_chosen, correction=self.correction, kernels=self.kernels, **how
            )
            return Choice(experts, weights, scores)
        ranked = scores.detach() if self.correction is None else scores.detach() + self.correction
        ranked = _in_best_groups(ranked, mixture)
        experts = ranked.topk(mixture.num_chosen, dim=-1).indices
        weights = scores.gather(1, experts)
        if mixture.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Choice(experts, weights * mixture.scale, scores)


def balancing_loss(choice: Choice, counts: Tensor) -> Tensor:
    """Return the unevenness of the load: the number of experts times the sum over experts of load times mean score.

    The load counts all choices of a token, so an even load gives the number of choices (Switch Transformer, equation 4,
    has one choice). Scores are shares: sigmoids are divided by their sum (DeepSeek-V3, equation 18).
    """
    num_tokens, num_experts = choice.scores.shape
    shares = choice.scores / choice.scores.sum(-1, keepdim=True)
    return num_experts * (counts / num_tokens * shares.mean(0)).sum()


def _plain_precision(device: torch.device) -> AbstractContextManager[Any]:
    # The meta device has no autocast. Asking torch about that ends a compiled graph (seen with torch 2.11).
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def _in_best_groups(ranked: Tensor, mixture: Mixture) -> Tensor:
    """Return scores with all experts outside each token's best groups excluded.

    The score of a group is that of its best expert (DeepSeek-V2, section 2.2.2), or of its best two together for
    sigmoid scores (DeepSeek-V3, section 2.1.2).
    """
    groups = ranked.view(ranked.shape[0], mixture.num_groups, -1)
    best = min(2 if mixture.scores == "sigmoid" else 1, groups.shape[-1])
    chosen = groups.topk(best, dim=-1).values.sum(-1).topk(mixture.num_chosen_groups, dim=-1).indices
    is_chosen = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, chosen, True)
    return groups.masked_fill(~is_chosen[..., None], float("-inf")).flatten(-2)
