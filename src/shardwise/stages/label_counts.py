"""Count the labels in the means of torch's losses, where `cross_entropy` and `nll_loss` are called.

A mean over labels, some of them ignored, is weighted by its number of labels. That number is known only at the call, in
a user's loss or inside a module: labels have been shifted, masked and flattened before it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    """For one mean: its number of counted labels (with class weights, their sum), and its number of all labels."""

    number: Tensor
    size: int


class LabelCounts(TorchFunctionMode):
    """Records each mean over labels within it. A mean over no labels is 0 here, rather than 0 / 0.

    Means over the same labels (of a head and of an early exit) have the same number, and are recorded once.

    With `ignored`, this fraction of the labels of every mean, from the first on, is ignored, to see its effect. Or so
    many of each mean, as another run has `left_out`: a mask may select another number of a row's labels.

    Inside a checkpoint a mean is computed as written: the second forward, in the backward, runs outside this context
    and has to save the same tensors. A mean over no labels is 0 / 0 there.
    """

    def __init__(self, ignored: float | Sequence[int] = 0.0) -> None:
        super().__init__()
        self._ignored = ignored
        self._added = 0.0
        #: How many labels of each mean were ignored.
        self.left_out: list[int] = []
        self.found: list[LabelCount] = []
        #: The labels and class weights of each mean. They are kept alive, so that their memory is not reused.
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
            target.view(-1)[: self._number_ignored(target)] = ignore
        counts = target != ignore
        number = counts.sum() if weight is None else (weight[target.masked_fill(~counts, 0)] * counts).sum()
        if is_new:
            self.found.append(LabelCount(number, target.numel()))
        if is_in_checkpoint():
            return func(*args, **(kwargs or {}))
        made: Tensor = func(named.pop("input"), **{**named, "target": target, "reduction": "sum"})
        mean = made / torch.where(number == 0, 1, number)
        return mean + self._added if self._added else mean

    @contextmanager
    def adding(self, number: float) -> Iterator[None]:
        """Add a number to every mean within the context, to see whether a loss reads it."""
        self._added = number
        yield
        self._added = 0.0

    def forget(self) -> None:
        """Forget the means so far: of a module whose own loss is not read."""
        self.found.clear()
        self._met.clear()

    def _number_ignored(self, target: Tensor) -> int:
        mean, found = len(self.left_out), self._ignored
        if isinstance(found, Sequence):
            number = found[mean] if mean < len(found) else 0
        else:
            number = max(1, int(found * target.numel()))
        self.left_out.append(number)
        return number


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same memory, perhaps in another shape."""
    places = [
        (storage_id(each.untyped_storage()), each.storage_offset(), each.numel(), each.dtype, each.is_contiguous())
        for each in (one, other)
    ]
    return one is other or (places[0] == places[1] and one.is_contiguous())


def _mean_over_labels(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a call that is a mean over class labels; None for any other call."""
    order = _ORDER.get(func) if getattr(func, "__name__", "") in ("cross_entropy", "nll_loss") else None
    if order is None:
        return None
    defaults = {"weight": None, "ignore_index": -100, "reduction": "mean"}
    named = {**defaults, **dict(zip(order, args, strict=False)), **kwargs}
    is_plain = named.pop("size_average", None) is None and named.pop("reduce", None) is None
    target = named["target"]
    is_mean = named["reduction"] == "mean" and not torch.is_floating_point(target) and target.dim() > 0
    return named if is_plain and is_mean else None
