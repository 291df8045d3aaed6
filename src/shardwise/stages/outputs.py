"""Join the module's outputs for microbatches to the output for the batch, and split its gradients again.

rows      a tensor with a row for each of the microbatch's: concatenated
mean      a number, such as a loss: the mean, weighted by rows
labels    a number that is a mean over labels: the mean, weighted by labels
sum       a number that is a sum: the sum
same      a tensor that is the same for all: the first one

Which of them a number is, a few rows have told (`rows_apart.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.stages.rows_apart import LabelsCounted, Way
from shardwise.stages.split.outline import open_dataclasses
from shardwise.torch_private import pytree


class _Leaf(NamedTuple):
    """One tensor of the output, from each microbatch."""

    how: Literal["rows", "same"] | Way
    parts: list[Tensor]


class Joint:
    """The outputs of all microbatches of a pass. `tensors` are the tensor leaves, by index.

    `ways` says how numbers are joined, by index; means by rows if it does not. `counted` are the labels of the
    microbatches."""

    def __init__(
        self, outputs: Sequence[Any], rows: Sequence[int], ways: Mapping[int, Way] | None = None,
        counted: Sequence[LabelsCounted] = (),
    ) -> None:  # fmt: skip
        self._rows, self._ways, self._counted = rows, ways or {}, counted
        open_dataclasses(outputs[0])
        flat = [pytree.tree_flatten(each) for each in outputs]
        self._leaves, self._tree = flat[0]
        for number, (leaves, tree) in enumerate(flat):
            if tree != self._tree or len(leaves) != len(self._leaves):
                raise ShardwiseError(
                    f"the module returns {tree} for microbatch {number} and {self._tree} for microbatch 0, so they"
                    " cannot be joined",
                    remedy="microbatches=1",
                )
        self.tensors = {
            number: self._leaf(number, [leaves[number] for leaves, _ in flat])
            for number, each in enumerate(self._leaves)
            if isinstance(each, Tensor)
        }

    @property
    def differentiable(self) -> list[int]:
        """The indices of leaves that may receive gradients."""
        return [number for number, leaf in self.tensors.items() if any(each.requires_grad for each in leaf.parts)]

    def joined(self, number: int, device: torch.device) -> Tensor:
        """Return one leaf of the output for the batch, detached."""
        how, parts = self.tensors[number]
        values = [each.detach() for each in parts]
        if how == "rows":
            return torch.cat(values).to(device)
        if how != "same":
            weighed = [value * weight for value, weight in zip(values, self._weights(how), strict=True)]
            return torch.stack(weighed).sum().to(device)
        return values[0].to(device, copy=True)

    def filled(self, tensors: dict[int, Tensor]) -> Any:
        """Return the output with these tensors as its leaves."""
        leaves = [tensors.get(number, each) for number, each in enumerate(self._leaves)]
        return pytree.tree_unflatten(leaves, self._tree)

    def starts(self, number: int, gradient: Tensor) -> list[tuple[Tensor, Tensor] | None]:
        """Return, for each microbatch, its part of a leaf and the gradient for it; None if it needs none."""
        how, parts = self.tensors[number]
        gradient = gradient.to(parts[0].device)
        if how == "rows":
            gradients = list(torch.split(gradient, list(self._rows)))
        elif how != "same":
            gradients = [gradient * weight for weight in self._weights(how)]
        else:
            gradients = [gradient, *(torch.zeros_like(gradient) for _ in parts[1:])]
        pairs = zip(parts, gradients, strict=True)
        return [(part, each.contiguous()) if part.requires_grad else None for part, each in pairs]

    def _weights(self, way: Way) -> list[float]:
        """Return the weight of each microbatch in a number."""
        if way == "sum":
            return [1.0] * len(self._rows)
        if way == "even" and any(each.ignores for each in self._counted):
            raise ShardwiseError(
                "the module returns a mean over labels and something else in one number, and microbatches ignore"
                " different numbers of labels",
                remedy="a loss that is computed from the module's scores; or microbatches=1",
            )
        if way != "labels":
            return [rows / sum(self._rows) for rows in self._rows]
        labels = [each.labels for each in self._counted if each.labels is not None]
        if len(labels) < len(self._rows):
            raise ShardwiseError(
                "the module returned a mean over labels for the first batch, and now some microbatches have none, or"
                " several such means: their weights are not told",
                remedy="a loss that is computed from the module's scores; or microbatches=1",
            )
        return [each / (sum(labels) or float("nan")) for each in labels]

    def _leaf(self, number: int, parts: list[Tensor]) -> _Leaf:
        if all(each.dim() and len(each) == rows for each, rows in zip(parts, self._rows, strict=True)):
            return _Leaf("rows", parts)
        if all(not each.dim() and each.is_floating_point() for each in parts):
            return _Leaf(self._ways.get(number, "mean"), parts)
        if all(torch.equal(each, parts[0]) for each in parts[1:]):
            return _Leaf("same", parts)
        raise ShardwiseError(
            f"the module returns a tensor of shape {tuple(parts[0].shape)} (number {number + 1} of its output) that has"
            f" no row for each of the {self._rows[0]} of a microbatch and is not the same for all: it cannot be joined",
            remedy="return it with the batch as its first dim, or microbatches=1",
        )
