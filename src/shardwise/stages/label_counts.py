"""How many labels the means of torch's losses are over: seen where `cross_entropy` and `nll_loss` are called.

A mean over labels, of which some are ignored, weighs as much as it has labels. Wherever it is called, in a user's loss
or inside of a module, that number is known there and nowhere else: labels have been shifted, masked, flattened before.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardwise.torch_private import is_in_checkpoint, storage_id

_ORDER = {
    functional.cross_entropy: (
        "input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing",
    ),
    functional.nll_loss: ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
}  # fmt: skip


class LabelCount(NamedTuple):
    """Of one mean: its labels that count (with weights of classes, the sum of these), and how many there are."""

    number: Tensor
    size: int


class LabelCounts(TorchFunctionMode):
    """Notes each mean over labels while it is entered. A mean over none is 0 here, and not 0 / 0.

    Means over the same labels (of a head and of an early one) have one number, whatever else they are, and are noted as
    one.

    With `ignored` the first so many labels of every mean are left out, to see what a loss makes of that.

    Inside of a checkpoint a mean is computed as it is written: the second forward, in the backward, is nobody's to
    watch, and has to keep the same tensors. A mean over none is 0 / 0 there.
    """

    def __init__(self, ignored: float = 0.0) -> None:
        super().__init__()
        self._ignored = ignored
        self.found: list[LabelCount] = []
        #: The labels and weights of classes of each, which have to live: memory that is free again is others'.
        self._met: list[tuple[Tensor, int, Tensor | None]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        named = _mean_over_labels(func, args, kwargs or {})
        if named is None:
            return func(*args, **(kwargs or {}))
        target, ignore, weight = named["target"], named["ignore_index"], named["weight"]
        is_new = not any(_is_same(target, each[0]) and ignore == each[1] and weight is each[2] for each in self._met)
        self._met.append((target, ignore, weight))
        if self._ignored:
            target = target.clone()
            target.view(-1)[: max(1, int(self._ignored * target.numel()))] = ignore
        counts = target != ignore
        number = counts.sum() if weight is None else (weight[target.masked_fill(~counts, 0)] * counts).sum()
        if is_new:
            self.found.append(LabelCount(number, target.numel()))
        if is_in_checkpoint():
            return func(*args, **(kwargs or {}))
        made: Tensor = func(named.pop("input"), **{**named, "target": target, "reduction": "sum"})
        return made / torch.where(number == 0, 1, number)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether these are the same numbers in memory, perhaps in another shape."""
    places = [
        (storage_id(each.untyped_storage()), each.storage_offset(), each.numel(), each.dtype, each.is_contiguous())
        for each in (one, other)
    ]
    return one is other or (places[0] == places[1] and one.is_contiguous())


def _mean_over_labels(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of a call that is a mean over labels of classes; None if it is another one."""
    order = _ORDER.get(func) if getattr(func, "__name__", "") in ("cross_entropy", "nll_loss") else None
    if order is None:
        return None
    defaults = {"weight": None, "ignore_index": -100, "reduction": "mean"}
    named = {**defaults, **dict(zip(order, args, strict=False)), **kwargs}
    is_plain = named.pop("size_average", None) is None and named.pop("reduce", None) is None
    target = named["target"]
    is_mean = named["reduction"] == "mean" and not torch.is_floating_point(target) and target.dim() > 0
    return named if is_plain and is_mean else None
