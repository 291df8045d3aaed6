"""Batches, losses and optimizers that cases are trained with."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

WORDS, ROWS, TOKENS = 12, 8, 8


def batch(seed: int, *, takes_ids: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """A batch of a step: ids or numbers, labels of which some are not to be learned, and a weight for each row."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (ROWS, TOKENS), generator=generator)
    numbers = torch.randn(ROWS, TOKENS, 6, generator=generator)
    labels = torch.randint(WORDS, (ROWS, TOKENS), generator=generator)
    weights = torch.rand(ROWS, generator=generator) + 0.5
    return {"x": ids if takes_ids else numbers.to(dtype), "labels": labels, "weights": weights.to(dtype)}


def _scores(output: Any) -> Tensor:
    if isinstance(output, tuple):
        found: Tensor = output[0]
        return found
    return output["logits"] if isinstance(output, Mapping) else output


def _entropy(output: Any, given: Mapping[str, Tensor], reduction: str) -> Tensor:
    return functional.cross_entropy(_scores(output).flatten(0, 1), given["labels"].flatten(), reduction=reduction)


def _counted(output: Any, given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    ignored = given["labels"] % 5 == 0
    labels = given["labels"].masked_fill(ignored, -100)
    summed = functional.cross_entropy(_scores(output).flatten(0, 1), labels.flatten(), reduction="sum")
    return summed, (labels >= 0).sum()


def _by_tokens(output: Any, given: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    return _entropy(output, given, "sum"), given["labels"].numel()


def _weighted(output: Any, given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    each = _entropy(output, given, "none").view(given["labels"].shape).mean(1)
    return (each * given["weights"]).sum(), given["weights"].sum()


def _squares(output: Any, given: Mapping[str, Tensor]) -> Tensor:
    scores = _scores(output)
    return functional.mse_loss(scores, functional.one_hot(given["labels"], WORDS).to(scores))


def _with_more(output: Any, given: Mapping[str, Tensor]) -> Tensor:
    scores = _scores(output)
    return _entropy(output, given, "mean") + 1e-2 * torch.logsumexp(scores, -1).square().mean()


def _smoothed(output: Any, given: Mapping[str, Tensor]) -> Tensor:
    scores, labels = _scores(output).flatten(0, 1), given["labels"].flatten()
    return functional.cross_entropy(scores, labels, label_smoothing=0.1)


def _focal(output: Any, given: Mapping[str, Tensor]) -> Tensor:
    each = _entropy(output, given, "none")
    return ((1 - (-each).exp()).square() * each).mean()


def _distilled(output: Any, given: Mapping[str, Tensor]) -> Tensor:
    scores = _scores(output)
    target = functional.softmax(scores.detach().roll(1, -1), -1)
    return _entropy(output, given, "mean") + functional.kl_div(scores.log_softmax(-1), target, reduction="batchmean")


@dataclass(frozen=True)
class Loss:
    """A loss, and whether it gives its sum and the number that it is summed over, for each token."""

    of: Callable[[Any, Mapping[str, Tensor]], Any]
    counts: bool = False


LOSSES: dict[str, Loss] = {
    "mean": Loss(lambda output, given: _entropy(output, given, "mean")),
    "sum and number": Loss(_by_tokens, counts=True),
    "some ignored": Loss(_counted, counts=True),
    "weighted rows": Loss(_weighted),
    "squares": Loss(_squares),
    "with a penalty of scores": Loss(_with_more),
    "smoothed": Loss(_smoothed),
    "focal": Loss(_focal),
    "distilled": Loss(_distilled),
}

#: Losses that are no mean of the means of equal parts, and do not say so.
UNEVEN_LOSSES: dict[str, Loss] = {
    "a mean of some": Loss(lambda output, given: _counted(output, given)[0] / _counted(output, given)[1]),
    "a sum": Loss(lambda output, given: _entropy(output, given, "sum") / 64),
}

#: Makes an optimizer: it is given the module, and what `parallelize` gives a factory.
Make = Callable[[nn.Module, list[nn.Parameter]], Optimizer]


def _groups(parameters: Iterable[nn.Parameter], is_slow: Callable[[nn.Parameter], bool]) -> list[dict[str, Any]]:
    every = list(parameters)
    slow, fast = [each for each in every if is_slow(each)], [each for each in every if not is_slow(each)]
    return [{"params": slow, "weight_decay": 0.0, "lr": 0.02}, {"params": fast, "weight_decay": 0.2}]


def _by_name(module: nn.Module, _: list[nn.Parameter]) -> Optimizer:
    slow = {id(each) for name, each in module.named_parameters() if name.endswith("bias") or "norm" in name}
    return SGD(_groups(module.parameters(), lambda each: id(each) in slow), lr=0.1, momentum=0.9)


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda _, parameters: SGD(parameters, lr=0.1),
    "momentum": lambda _, parameters: SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adamw": lambda _, parameters: AdamW(parameters, lr=1e-2, eps=1e-4),
    "by shape": lambda _, parameters: AdamW(_groups(parameters, lambda each: each.ndim < 2), lr=1e-2, eps=1e-4),
    "by name": _by_name,
    "by identity": lambda module, parameters: SGD(
        _groups(parameters, lambda each: each is module.get_submodule("head").weight), lr=0.1
    ),
    "by attribute": lambda _, parameters: SGD(
        _groups(parameters, lambda each: getattr(each, "no_decay", False)), lr=0.1
    ),
    "by place": lambda _, parameters: SGD(
        [{"params": parameters[:3], "lr": 0.02}, {"params": parameters[3:]}], lr=0.1, momentum=0.5
    ),
    "those that require it": lambda _, parameters: SGD([each for each in parameters if each.requires_grad], lr=0.1),
}
