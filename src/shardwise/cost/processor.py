"""Seconds of operations on a CPU, whose kernels were measured by kind.

A CPU has nothing that the constants of GPUs describe: no tiles in waves, no asynchronous launches, no collectives that
overlap with compute. The core that calls a kernel also computes it. So calls, work and transfers to other processes
add up:

    seconds = call + amount / rate                           by kind
    matmul:     FLOPs / rate  +  bytes of operands / rate    operands are packed before they are multiplied
    attention:  FLOPs / rate  +  scores / rate               their exponentials, however long a head is; masked ones too
                              +  scores / rate of masks      where it is given one
    a layer, an embedding or a loss that is cut over ranks: a longer call
    optimizer:  bytes / rate  +  a call for each tensor
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.cluster.cluster import Pool
from shardwise.cluster.kernel import Kernel, find_kernel, find_split, get_kernel, meeting_seconds
from shardwise.cost.compute import ZERO, Engine, Seconds
from shardwise.cost.constants import Constants
from shardwise.cost.numbers import Floats, Number
from shardwise.model.flops import Passes, flops, gemm
from shardwise.model.model import Block
from shardwise.model.operations import (
    Attention,
    Convolution,
    CrossEntropy,
    Elementwise,
    Embedding,
    Matmul,
    Norm,
    Operation,
    Product,
)
from shardwise.model.share import Share
from shardwise.model.traffic import traffic

# Seconds of a step in addition to its instructions. Measured with tiny models on one core of a Xeon at 2.5 GHz, as CPU
# time: 1.1 to 1.8 ms more than the same step written by hand, and 0.7 ms for the batch, in another thread.
_STEP_SECONDS = 0.002
_WEIGHTED = (Matmul, Convolution, Norm)


def amounts(operation: Operation, share: Share) -> list[tuple[str, Passes]]:
    """Return the amount of each measured kind in an operation."""
    plain = replace(share, fused=False)
    match operation:
        case Matmul() | Convolution():
            work, moved = flops(operation, share), traffic(operation, plain)
            # Weight gradients are accumulated: two reads and one write.
            added = Passes(0, 0, 3 * moved.written.weight)
            return [("matmul", work), ("operands", moved.moved), ("elementwise", added)]
        case Product():
            return [("matmul", flops(operation, share))]
        case Attention():
            work = flops(operation, replace(share, flash=False))
            pairs = work.forward // (2 * (operation.qk_dim + operation.v_dim))
            return [("attention", work), ("scores", Passes(pairs, pairs, 0))]
        case Norm(kind="rms"):
            kind = "norm"
        case CrossEntropy():
            kind = "loss"
        case Elementwise(name="nonlinearity" | "rotation"):
            kind = operation.name
        case _:
            kind = "elementwise"
    return [(kind, traffic(operation, plain).moved)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorEngine(Engine):
    """Prices operations on a device whose kernels were measured by kind."""

    def block(self, block: Block, share: Share) -> Seconds:
        return self._sum(block, block.operations, share)

    def operation(self, operation: Operation, share: Share, *, narrow: bool = True) -> Seconds:  # noqa: ARG002
        return operation_seconds(self.device.kernels, operation, share, masks=self.software.masks_documents)

    def halves(self, block: Block, share: Share, whole: Seconds) -> Floats:
        split = find_split(self.device.kernels)
        return np.asarray(split.fraction * (whole.input + whole.weight) + split.call_seconds * num_cuts(block, share))

    def stream(self, num_bytes: Number) -> Floats:
        return np.asarray(num_bytes, dtype=np.float64) / self._kernel("elementwise").forward

    def optimizer(self, num_bytes: Floats, num_tensors: Floats) -> Floats:
        kernel = self._kernel("optimizer")
        return num_bytes / kernel.forward + num_tensors * kernel.forward_call

    def _kernel(self, kind: str) -> Kernel:
        return get_kernel(self.device.kernels, kind)


def operation_seconds(kernels: Sequence[Kernel], operation: Operation, share: Share, *, masks: bool = False) -> Seconds:
    """Return the seconds of one operation. With `masks`, attention has a mask."""
    total = ZERO
    for index, (kind, amount) in enumerate(amounts(operation, share)):
        # A call counts once, even if its work is counted in several kinds.
        calls = num_calls(operation, share) if index == 0 else 0
        total = _add(total, _seconds(get_kernel(kernels, kind), amount, calls))
        if kind == "scores" and masks:
            total = _add(total, _seconds(get_kernel(kernels, "masks"), amount, 0))
    cut = find_kernel(kernels, "sharded")
    return total if cut is None else _add(total, _seconds(cut, Passes(0, 0, 0), num_cut_calls(operation, share)))


def _seconds(kernel: Kernel, amount: Passes, calls: Number) -> Seconds:
    """Return the seconds of each pass. If there are weight gradients, half of a backward's call counts for them."""
    forward, inputs, weights = (np.asarray(each, dtype=np.float64) for each in amount)
    halves = np.where(weights > 0, 0.5, 1.0)
    return Seconds(
        forward / kernel.forward + calls * kernel.forward_call,
        inputs / kernel.backward + calls * kernel.backward_call * halves,
        weights / kernel.backward + calls * kernel.backward_call * (1.0 - halves),
    )


def num_calls(operation: Operation, share: Share) -> Number:
    """Return the number of calls. Unfused projections are called one by one, and so are experts."""
    if not isinstance(operation, Matmul):
        return 1
    return len(operation.outputs) * np.asarray(gemm(operation, share).num_products)


def num_cut_calls(operation: Operation, share: Share) -> Number:
    """Return the calls that take longer because `tp` cuts the layer: one for projections that read the same tensor."""
    match operation:
        case Matmul() | Embedding():
            is_cut = operation.sharding != "none"
        case CrossEntropy():
            is_cut = operation.cut == "tp"
        case _:
            is_cut = False
    return (np.asarray(share.tp) > 1).astype(np.int64) * int(is_cut)


def num_cuts(block: Block, share: Share) -> Number:
    """Return the calls of a block that have weights: at each of them, a backward in two halves is interrupted."""
    return sum(num_calls(each, share) for each in block.operations if isinstance(each, _WEIGHTED))


def _add(*each: Seconds) -> Seconds:
    return Seconds(*(_total(passes) for passes in zip(*each, strict=True)))


def _total(seconds: Iterable[Floats]) -> Floats:
    return sum(seconds, np.zeros(()))


def engine_on(engine: Engine) -> Engine:
    """Return the engine of a device: one that uses its kernels, if they were measured by kind."""
    if not engine.device.kernels:
        return engine
    return ProcessorEngine(device=engine.device, software=engine.software, constants=engine.constants)


def constants_on(pool: Pool, constants: Constants) -> Constants:
    """Return the constants for a pool. If kernels were measured, then so were collectives between processes, and the
    time that is lost when ranks wait for each other.

    The cores that compute also move bytes, so overlapped communication slows compute down, unless there are more cores
    than processes.
    """
    if not pool.device.kernels:
        return constants
    spare = min(max(pool.node.host.num_cores / pool.node.devices_per_node - 1.0, 0.0), 1.0)
    waits = meeting_seconds(pool.device.kernels)
    return replace(
        constants,
        sync_seconds=waits,
        meeting_seconds=waits,
        sync_rate=1.0,
        exchange_rate=1.0,
        hop_rate=1.0,
        gather_rate=1.0,
        dp_hidden=constants.dp_hidden * spare,
        overlap_loss=1.0 - spare,
        step_seconds=_STEP_SECONDS,
    )
