"""Seconds of a block's compute on one rank: forward, gradient of the input, gradient of the weights.

A matmul takes the longer of two times: its tiles, computed in waves over the device's units, or its memory traffic.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from shardwise.cluster.device import Device
from shardwise.cost.constants import Constants
from shardwise.cost.numbers import Floats, Number, ceil_divide, choose
from shardwise.cost.software import Software
from shardwise.model.flops import Gemm, expert_rows, flops, gemm
from shardwise.model.model import Block
from shardwise.model.operations import (
    Attention,
    CrossEntropy,
    Elementwise,
    Matmul,
    Norm,
    Operation,
    Permutation,
    Product,
    Router,
    Scan,
)
from shardwise.model.share import Share
from shardwise.model.traffic import traffic

# Tile sizes of matmul libraries, and the rate of each relative to the best: a smaller tile reads more bytes per
# product. 128 x 256 is the usual one (facts 3.3).
_TILES = np.array([(256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.78), (64, 64, 0.6)])
_HEIGHTS, _WIDTHS, _REACHED = (column[:, None] for column in _TILES.T)
# FLOP/s of one multiprocessor of an H100 (facts 3.1), and the share of the peak that a matmul reaches on an A100.
_HOPPER_UNIT = 989e12 / 132
_AMPERE_MATMUL = 0.81
# Up to this head dimension, an attention kernel computes more exponentials per product.
_SMALL_HEAD = 64
# Up to this many rows, matmuls read quantised weights directly (`kernels/few_rows_linear.py`).
_NARROW_ROWS = 128


class Seconds(NamedTuple):
    """Seconds of each of the three passes."""

    forward: Floats
    input: Floats
    weight: Floats

    @property
    def total(self) -> Floats:
        return self.forward + self.input + self.weight


ZERO = Seconds(np.zeros(()), np.zeros(()), np.zeros(()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Prices operations on a device with its software.

    `layer_bytes` is the bytes of a layer's weight if it is stored in fewer bits than it is multiplied in.
    """

    device: Device
    software: Software
    constants: Constants
    layer_bytes: float | None = None

    def block(self, block: Block, share: Share) -> Seconds:
        """Return the seconds of a block for one microbatch on one rank: its kernels, or their launches if longer."""
        total = self._sum(block, block.operations, share)
        kernels = self.num_kernels(block, share)
        if self.software.blocking_launches:
            waits = self.constants.blocking_seconds * kernels
            return Seconds(total.forward + waits, total.input + waits, total.weight + waits / 2)
        launches = self._launch_seconds(block) * kernels
        return Seconds(
            np.maximum(total.forward, launches),
            np.maximum(total.input, launches),
            np.maximum(total.weight, launches / 2),
        )

    def halves(self, block: Block, share: Share, whole: Seconds) -> Floats:  # noqa: ARG002
        """Return the seconds that a block's backward takes in addition in two halves. Nothing was fitted for GPUs."""
        return np.zeros(())

    def _launch_seconds(self, block: Block) -> float:
        """Return the CPU's seconds for one launch."""
        if self.software.cuda_graphs:
            return 0.0
        has_experts = any(isinstance(each, Router) for each in block.operations)
        return self.constants.expert_launch_seconds if has_experts else self.constants.launch_seconds

    def rerun(self, block: Block, share: Share, parts: frozenset[str] | None) -> Floats:
        """Return the seconds of recomputation in a backward: of the named parts, or of the whole forward (None)."""
        if parts is None:
            return self.block(block, share).forward
        again = [each for each in block.operations if not parts.isdisjoint(each.rerun_by)]
        return self._sum(block, again, share).forward

    def rerun_between(self, block: Block, share: Share) -> Floats:
        """Return the seconds to recompute all but matmuls and attention; with `every_second`, half the matmuls too."""
        kept = [each for each in block.operations if isinstance(each, (Matmul, Product))]
        again = [each for each in block.operations if not isinstance(each, (Matmul, Product, Attention))]
        seconds = self._sum(block, again, share).forward
        return seconds + 0.5 * self._sum(block, kept, share).forward if self.software.every_second else seconds

    def _sum(self, block: Block, operations: Iterable[Operation], share: Share) -> Seconds:
        """Return the seconds of some of a block's operations. Layers may run in 8 or 4 bits; embedding and head not."""
        each = [self.operation(operation, share, narrow=bool(block.stack)) for operation in operations]
        return Seconds(*(sum(seconds, np.zeros(())) for seconds in zip(*each, strict=True))) if each else ZERO

    def operation(self, operation: Operation, share: Share, *, narrow: bool = True) -> Seconds:
        """Return the seconds of one operation. `narrow`: it may run in 8 or 4 bits, as layers may and heads may not."""
        if isinstance(operation, Matmul):
            return self._matmul(operation, share, narrow=narrow)
        if isinstance(operation, Attention) and self.software.is_flash:
            return self._flash(operation, share)
        if isinstance(operation, Attention):
            return self._scores(operation, share)
        fused = self.software.fused
        if isinstance(operation, Norm):
            fused = self.software.fused_norms
        if isinstance(operation, CrossEntropy):
            fused = self.software.fused_loss
        if isinstance(operation, Elementwise) and operation.name == "rotation":
            fused = fused and not self.software.complex_rotation
        moved = traffic(operation, replace(share, fused=fused)).moved
        work = flops(operation, share)
        rate = self._rate("wide")
        more = 1.0 if fused else self.constants.unfused
        if isinstance(operation, Scan):
            # The kernels are in Triton with Ampere's instructions: hardly faster on Blackwell than on Hopper.
            rate = self.device.peak(self.software.wide_precision) * self._ampere_share() / self.constants.scan
        return Seconds(
            *(
                np.maximum(more * self.stream(each), np.asarray(arithmetic) / rate)
                for each, arithmetic in zip(moved, work, strict=True)
            )
        )

    def stream(self, num_bytes: Number) -> Floats:
        """Return the seconds of memory traffic. Tensors that fit the cache are faster for the next kernel to read."""
        moved = np.asarray(num_bytes, dtype=np.float64)
        room = self.device.cache_bytes
        gain = 1.0 + (self.constants.cached - 1.0) * np.clip(2.0 - moved / max(room, 1), 0.0, 1.0)
        return moved / (self._streaming * gain)

    def optimizer(self, num_bytes: Floats, num_tensors: Floats) -> Floats:  # noqa: ARG002 - they take many at once
        """Return the seconds of an optimizer's step with this memory traffic."""
        return np.asarray(self.constants.optimizer * num_bytes / self._streaming)

    @property
    def _streaming(self) -> float:
        return self.device.streaming_bytes_per_second * self.constants.streaming

    def _rate(self, kind: str) -> float:
        """Return the FLOP/s with a full tile on every unit, sustained through a step."""
        precision = self.software.matmul_precision if kind == "narrow" else self.software.wide_precision
        wide = self.device.matmul_efficiency
        rate = self.device.peak(precision) * (self.device.fp8_efficiency or wide if kind == "narrow" else wide)
        share = getattr(self.constants, f"sustained_{self.device.architecture}", self.constants.sustained_other)
        if kind == "narrow" and self.device.architecture in ("hopper", "blackwell"):
            # No matmul is faster than the best measured one. On other architectures, no published run reaches more than
            # the share of bf16.
            share = min(share * getattr(self.constants, f"narrow_{self.software.precision}"), 1.0)
        return rate * share

    def _matmul(self, operation: Matmul, share: Share, *, narrow: bool) -> Seconds:
        shape = gemm(operation, share)
        rows, count = _read(operation, share, shape)
        is_narrow = narrow and operation.sharding != "none" and self.software.matmul_precision in ("fp8", "fp4")
        is_narrow = is_narrow and not (self.software.fp8_layers and operation.num_experts)
        rate = self._rate("narrow" if is_narrow else "wide")

        if operation.num_experts:
            fast = self.software.fast_dispatch
            rate *= self.constants.fast_grouped if fast else self.constants.grouped

        def seconds(m: Number, k: Number, n: Number) -> Floats:
            return matmul_seconds(self.device, rate, m, k, n, constants=self.constants, count=count, width=share.width)

        forward, inputs = seconds(rows, shape.k, shape.n), seconds(rows, shape.n, shape.k)
        if self.layer_bytes is not None and narrow:
            as_kept = matmul_seconds(
                self.device, rate, rows, shape.k, shape.n, constants=self.constants, count=count, width=share.width,
                weight_width=self.layer_bytes,
            )  # fmt: skip
            # For many rows, and for experts, a weight is dequantised first.
            size = np.asarray(count, dtype=np.float64) * np.asarray(shape.k, dtype=np.float64) * shape.n
            made_wide = forward + size * (self.layer_bytes + share.width) / self._streaming
            is_wide = (np.asarray(rows) > _NARROW_ROWS) | bool(operation.num_experts)
            forward = np.where(is_wide, made_wide, as_kept)
        weights = seconds(shape.k, rows, shape.n)
        # Accumulation onto the gradient of earlier microbatches: in the matmul's own kernel, or in a separate one.
        gradient = self.software.gradient_bytes
        added = 2 * gradient if self.software.fused_accumulation else 2 * gradient + share.width * (gradient > 2)
        weights = (
            weights + shape.num_products * shape.k * shape.n * added / self._streaming * self.constants.accumulation
        )
        if is_narrow:
            # As arrays, as in `matmul_seconds`.
            m, k, n, times = (np.asarray(each, dtype=np.float64) for each in (rows, shape.k, shape.n, count))
            cast = self.software.cast_bytes * times / self._streaming
            forward = forward + cast * (m * k + k * n)
            inputs = inputs + cast * (m * n + self.software.fp8_layers * k * n)
        return Seconds(forward, inputs * operation.input_gradient, weights * operation.trains)

    def _flash(self, operation: Attention, share: Share) -> Seconds:
        whole, other = self._flash_by(self.software.attention, operation, share), self.software.context_attention
        if other is None or not np.any(np.asarray(share.cp) > 1):
            return whole
        return choose(np.asarray(share.cp) > 1, self._flash_by(other, operation, share), whole)

    def _flash_by(self, kernel: str, operation: Attention, share: Share) -> Seconds:
        work = flops(operation, share)
        peak = self.device.peak(self.software.wide_precision)
        if kernel != "flash3":
            peak *= self._ampere_share()
        elif operation.qk_dim <= _SMALL_HEAD:
            peak *= self.constants.flash3_small_heads
        keys = np.asarray(share.sequence, dtype=np.float64)
        reached = keys / (keys + self.constants.attention_ramp)
        moved = traffic(operation, share).moved
        forward = np.asarray(work.forward) / (peak * getattr(self.constants, f"{kernel}_forward") * reached)
        backward = np.asarray(work.input) / (peak * getattr(self.constants, f"{kernel}_backward") * reached)
        return Seconds(
            np.maximum(forward, self.stream(moved.forward)),
            np.maximum(backward, self.stream(moved.input)),
            np.zeros(()),
        )

    def _ampere_share(self) -> float:
        """Return the share of the peak that Ampere's instructions reach, which FlashAttention 1 and 2 use.

        A multiprocessor of Blackwell runs them as fast as one of Hopper. Other architectures: as matmuls, against A100.
        """
        if self.device.architecture == "hopper":
            return self.constants.flash_on_hopper
        if self.device.architecture == "blackwell":
            as_hopper = _HOPPER_UNIT * self.device.num_units * self.constants.flash_on_hopper
            return min(as_hopper / self.device.peak(self.software.wide_precision), 1.0)
        return min(self.device.matmul_efficiency / _AMPERE_MATMUL, 1.0)

    def _scores(self, operation: Attention, share: Share) -> Seconds:
        """Price two batched products, with the matrix of scores in memory between them."""
        heads = -(-operation.heads // share.tp)
        count = share.microbatch * heads
        queries = -(-share.sequence // share.cp) if operation.rows is None else operation.rows
        keys = share.sequence if operation.key_rows is None else operation.key_rows
        rate = self._rate("wide")

        def seconds(m: Number, k: Number, n: Number) -> Floats:
            return matmul_seconds(self.device, rate, m, k, n, constants=self.constants, count=count)

        first, second = seconds(queries, operation.qk_dim, keys), seconds(queries, keys, operation.v_dim)
        products = (first + second) * (self.constants.misaligned if operation.qk_dim % 8 else 1.0)
        moved = traffic(operation, replace(share, fused=self.software.attention == "megatron")).moved
        more = getattr(self.constants, f"scores_{self.software.attention}")
        return Seconds(
            products + more * self.stream(moved.forward),
            2 * products + more * self.stream(moved.input),
            np.zeros(()),
        )

    def num_kernels(self, block: Block, share: Share) -> Floats:
        """Return the number of kernels that a block launches in its forward."""
        return sum((np.asarray(self._num_kernels(each, share)) for each in block.operations), np.zeros(()))

    def _num_kernels(self, operation: Operation, share: Share) -> Number:
        """Return the kernels of one operation's forward. Waits of the CPU for the device count as kernels too."""
        if isinstance(operation, Matmul):
            if not operation.num_experts or self.software.one_grouped:
                return 1
            return gemm(operation, share).num_products
        if isinstance(operation, Attention):
            whole = 2 if self.software.is_flash else 4 if self.software.attention == "megatron" else 8
            return whole + share.context_kernels
        if isinstance(operation, Norm):
            return 1 if self.software.fused_norms else 6
        if isinstance(operation, (Router, Permutation)):
            if self.software.routing_kernels is not None:
                return self.software.routing_kernels
            fast = self.software.fast_dispatch or self.software.graphed_routing
            return self.constants.routing_kernels * (self.constants.fast_routing if fast else 1.0)
        return 1 if self.software.fused else 4


def _read(operation: Matmul, share: Share, shape: Gemm) -> tuple[Number, Number]:
    """Return the rows and the number of products. Experts without rows are not read, so they do not count."""
    if not operation.num_experts:
        return shape.m, shape.num_products
    rows = np.asarray(expert_rows(operation, share), dtype=np.float64)
    # All `ep` ranks have as many rows as this one.
    missed = (1.0 - 1.0 / operation.num_experts) ** (rows * share.ep)
    count = np.asarray(shape.num_products, dtype=np.float64) * (1.0 - missed)
    return np.ceil(rows / np.maximum(count, 1e-9)), count


def matmul_seconds(
    device: Device,
    rate: float,
    m: Number,
    k: Number,
    n: Number,
    *,
    constants: Constants,
    count: Number = 1,
    width: float = 2.0,
    weight_width: float | None = None,
) -> Floats:
    """Return the seconds of `count` products of m x k by k x n; `rate` is the FLOP/s with a full tile on every unit.

    A partial last wave takes as long as a full one: `waves x tile`, not `tiles x tile / units`. The best of several
    tile sizes is chosen, as libraries do.
    """
    # New names, because with unions of number and array a type checker tries all combinations, for seconds.
    rows, inner, columns, times = (np.asarray(each, dtype=np.float64) for each in (m, k, n, count))
    tiles = ceil_divide(rows.ravel(), _HEIGHTS) * ceil_divide(columns.ravel(), _WIDTHS) * times.ravel()
    waves = ceil_divide(tiles, device.num_units)
    unit = rate / device.num_units * _REACHED
    best: Floats = (waves * (2 * _HEIGHTS * _WIDTHS / unit) * (inner.ravel() + constants.tile_ramp)).min(axis=0)
    moved: Floats = times * (
        (rows * inner + rows * columns) * width + inner * columns * (width if weight_width is None else weight_width)
    )
    return np.maximum(
        best.reshape(np.broadcast_shapes(rows.shape, inner.shape, columns.shape, times.shape)),
        moved / (device.streaming_bytes_per_second * constants.streaming),
    )
