"""The matmuls of a layer that is cut: in the dtype that it computes in, or in 8 bits (`kernels/fp8.py`).

Communication is the same in both: ranks sum wide numbers. Scales cover the data of one rank: its part of a weight, a
chunk that arrives.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.kernels.fp8 import E4M3, E5M2, FAST, MULTIPLE, Scaled, Scales, multiply, quantise, quantise_both
from shardwise.sharding.tensor.communication import Chunk

#: Lays tokens out as (batch, rank, token, channel), from which chunks are cut.
Lay = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Products:
    """Plain matmuls. A factor is anything that `multiply` takes; values kept for the backward are tensors."""

    def kept_weight(self, weight: Tensor, kind: torch.dtype) -> Tensor:
        """Return a weight in the form that is saved for the backward."""
        return weight.to(kind)

    def forward_matrix(self, weight: Tensor, is_transposed: bool) -> Any:
        return weight if is_transposed else weight.t()

    def backward_matrix(self, weight: Tensor, is_transposed: bool) -> Any:
        return weight.t() if is_transposed else weight

    def read(self, rows: Tensor, keeps: bool) -> tuple[Any, Sequence[Tensor]]:
        """Return received rows as a factor, and the tensors to keep for the weight gradient (`keeps`: if wanted)."""
        del keeps
        return rows, (rows,)

    def read_gradient(self, rows: Tensor) -> Any:
        return rows

    def take(self, given: Tensor, lay: Lay) -> Sequence[Tensor]:
        """Return the tensors to keep of a layer's whole input, from which chunks are multiplied."""
        del lay
        return (given,)

    def rows_of(self, kept: Sequence[Tensor], lay: Lay) -> Callable[[Chunk], Any]:
        """Return a function that gives a chunk of the kept input as a factor."""
        laid = lay(kept[0])
        return lambda chunk: chunk.rows(laid)

    def columns_of(self, kept: Sequence[Tensor], lay: Lay) -> Callable[[Chunk], Sequence[Tensor]]:
        """Return a function that gives a chunk of the kept input for the weight gradient."""
        laid = lay(kept[0])
        return lambda chunk: (chunk.rows(laid),)

    def multiply(self, left: Any, matrix: Any, bias: Tensor | None, into: Tensor) -> None:
        """Write left @ matrix + bias into a tensor of as many numbers, contiguous or not."""
        in_one_piece = into.is_contiguous()
        flat = into.view(-1, into.shape[-1]) if in_one_piece else into.new_empty((into[..., 0].numel(), into.shape[-1]))
        self._write(left, matrix, bias, flat)
        if not in_one_piece:
            into.copy_(flat.view(into.shape))

    def _write(self, left: Any, matrix: Any, bias: Tensor | None, flat: Tensor) -> None:
        if bias is None:
            torch.mm(left, matrix, out=flat)
        else:
            torch.addmm(bias, left, matrix, out=flat)

    def add(self, left: Any, matrix: Any, into: Tensor) -> None:
        into.addmm_(left, matrix)

    def weight_gradient(
        self, pairs: Iterable[tuple[Sequence[Tensor], Tensor]], kind: torch.dtype, *, is_transposed: bool
    ) -> Tensor:
        """Return the weight gradient, from chunks of the layer's input, each with the gradient of its output."""
        total: Tensor | None = None
        for (given,), gradient in pairs:
            left, right = (given.t(), gradient) if is_transposed else (gradient.t(), given)
            total = left @ right if total is None else total.addmm_(left, right)
        assert total is not None, "a layer has at least one chunk"
        return total.to(kind)


@dataclass(frozen=True)
class Fp8Products(Products):
    """Matmuls of 8-bit numbers. `on_device`: with the GPU's 8-bit matmuls; otherwise by their definition."""

    scales: Scales = "tensor"
    on_device: bool = True
    kernels: bool = True

    def kept_weight(self, weight: Tensor, kind: torch.dtype) -> Tensor:
        del kind
        return weight  # Quantised anew from the original in the backward.

    def forward_matrix(self, weight: Tensor, is_transposed: bool) -> Scaled:
        return self._quantised(weight, columns=is_transposed)

    def backward_matrix(self, weight: Tensor, is_transposed: bool) -> Scaled:
        return self._quantised(weight, columns=not is_transposed)

    def read(self, rows: Tensor, keeps: bool) -> tuple[Any, Sequence[Tensor]]:
        left, later = quantise_both(rows, E4M3, self.scales, columns=keeps, kernels=self.kernels)
        return left, () if later is None else later

    def read_gradient(self, rows: Tensor) -> Scaled:
        return quantise(rows, E5M2, self.scales, kernels=self.kernels)

    def take(self, given: Tensor, lay: Lay) -> Sequence[Tensor]:
        if self.scales == "row":
            return (given,)  # The backward needs scales of columns; those of rows do not serve.
        laid = lay(given)
        made = self._quantised(laid.flatten(0, 2))
        return made.numbers.view(laid.shape), made.scale

    def rows_of(self, kept: Sequence[Tensor], lay: Lay) -> Callable[[Chunk], Any]:
        if self.scales == "row":
            laid = lay(kept[0])
            return lambda chunk: self._quantised(chunk.rows(laid))
        return lambda chunk: Scaled(chunk.rows(kept[0]), kept[1])

    def columns_of(self, kept: Sequence[Tensor], lay: Lay) -> Callable[[Chunk], Sequence[Tensor]]:
        if self.scales == "row":
            laid = lay(kept[0])
            return lambda chunk: self._quantised(chunk.rows(laid), columns=True)
        return lambda chunk: (_turned(chunk.rows(kept[0])), kept[1])

    def _write(self, left: Any, matrix: Any, bias: Tensor | None, flat: Tensor) -> None:
        # A left factor in e4m3 is always a layer's input, hence the forward.
        fast = FAST["forward" if left.numbers.dtype is E4M3 else "backward"]
        multiply(left, matrix, flat.dtype, bias, products=self.on_device, fast=fast, out=flat)

    def add(self, left: Any, matrix: Any, into: Tensor) -> None:
        into.add_(multiply(left, matrix, into.dtype, products=self.on_device, fast=FAST["backward"]))

    def weight_gradient(
        self, pairs: Iterable[tuple[Sequence[Tensor], Tensor]], kind: torch.dtype, *, is_transposed: bool
    ) -> Tensor:
        total: Tensor | None = None
        for given, gradient in pairs:
            columns = quantise(gradient, E5M2, self.scales, columns=True, kernels=self.kernels)
            made = multiply(columns, Scaled(*given), kind, products=self.on_device, fast=FAST["backward"])
            total = made if total is None else total.add_(made)
        assert total is not None, "a layer has at least one chunk"
        return total.t().contiguous() if is_transposed else total

    def _quantised(self, x: Tensor, *, columns: bool = False) -> Scaled:
        return quantise(x, E4M3, self.scales, columns=columns, kernels=self.kernels)


def _turned(numbers: Tensor) -> Tensor:
    """Transpose 8-bit numbers, padded with zeros. It views them as bytes, which more torch operations support."""
    turned = functional.pad(numbers.view(torch.uint8).t(), (0, -len(numbers) % MULTIPLE))
    return turned.contiguous().view(numbers.dtype)
