"""Seconds of one microbatch on the first, a middle and the last stage: compute, recomputation and communication."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.cluster.cluster import Pool
from shardwise.cost.collective import Wires
from shardwise.cost.compute import Engine
from shardwise.cost.constants import Constants
from shardwise.cost.deal import Deal, deal, mix
from shardwise.cost.layouts import Layouts
from shardwise.cost.numbers import Floats, Number
from shardwise.cost.processor import constants_on, engine_on
from shardwise.cost.software import Software
from shardwise.model.model import Block, Model
from shardwise.model.operations import Attention, Permutation
from shardwise.model.share import Share

_SELECTIVE = frozenset({"core_attention"})
#: The columns of a layout that determine the work of a microbatch on a block, and the tensors that it saves.
DECIDE_WORK = ("microbatch", "tp", "cp", "ep", "sequence_parallel", "context", "recompute", "recompute_share")


# Kernels of each further piece of a ring: a send with its receive, two of attention, and ten that merge the result
# (`sharding/context/ring.py`). All-to-alls copy queries, keys, values and outputs of each rank one by one.
_PIECE_KERNELS = 13


class Work(NamedTuple):
    """Seconds of one microbatch on some blocks: the three passes, recomputation, exposed communication, and `halves`,
    the additional time of a backward that is split."""

    forward: Floats
    input: Floats
    weight: Floats
    again: Floats
    tp_forward: Floats
    tp_backward: Floats
    cp: Floats
    ep: Floats
    halves: Floats

    def take(self, index: NDArray[np.int64]) -> "Work":
        return Work(*(each[index] for each in self))

    def times(self, factor: Number) -> "Work":
        return Work(*(each * factor for each in self))

    @property
    def backward(self) -> Floats:
        return self.input + self.weight + self.again

    @property
    def total(self) -> Floats:
        return self.forward + self.backward + self.tp_forward + self.tp_backward + self.cp + self.ep


def add(*works: Work) -> Work:
    """Return the sum of several works."""
    return Work(*(sum(each, np.zeros(())) for each in zip(*works, strict=True)))


def _mixed(kinds: Sequence[Work], counts: Floats) -> Work:
    """Return the work of `counts` layers of each kind: candidates x kinds."""
    return add(*(work.times(count) for work, count in zip(kinds, counts.T, strict=True)))


class Pieces(NamedTuple):
    """Work of one microbatch on a layer of each kind, and on all blocks before and after the layers."""

    kinds: list[Work]
    begin: Work
    end: Work


class Stages(NamedTuple):
    """Work of one microbatch on a stage, by its place. `extra`: work of the fullest stage beyond a middle one."""

    first: Work
    middle: Work
    last: Work
    extra: Work
    layer: Work
    dealt: Deal


def share_of(layouts: Layouts, sequence: int, software: Software) -> Share:
    """Return the share of one microbatch that one rank computes."""
    return Share(
        sequence=sequence,
        microbatch=layouts.microbatch,
        tp=layouts.tp,
        sequence_parallel=layouts.sequence_parallel,
        cp=layouts.cp,
        context_kernels=_context_kernels(layouts),
        ep=layouts.ep,
        expert_tp=layouts.tp if software.cuts_experts else 1,
        gathered_once=software.gathered_once,
        flash=software.is_flash,
        fused=software.fused,
        width=software.width,
    )


def _context_kernels(layouts: Layouts) -> NDArray[np.int64]:
    """Return the kernels that context parallelism adds to the forward of attention."""
    around_ring = _PIECE_KERNELS * (layouts.cp - 1)
    return np.where(layouts.context == 0, around_ring, np.where(layouts.cp > 1, 4 * layouts.cp + 6, 0))


def share_of_ends(share: Share) -> Share:
    """Return the same for the blocks before and after the layers."""
    return replace(share, sequence_parallel=False) if share.gathered_once else share


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricer:
    """Prices the blocks of a model on a pool, with its software, for many candidates."""

    model: Model
    pool: Pool
    software: Software
    constants: Constants
    sequence: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "constants", constants_on(self.pool, self.constants))

    @property
    def engine(self) -> Engine:
        return engine_on(Engine(device=self.pool.device, software=self.software, constants=self.constants))

    @property
    def wires(self) -> Wires:
        return Wires(pool=self.pool)

    def pieces(self, layouts: Layouts) -> "Pieces":
        """Return the work of one microbatch on a layer of each kind, and on the blocks before and after the layers.

        It depends on few columns. Candidates that agree in these are priced once.
        """
        some, inverse = layouts.distinct(DECIDE_WORK)
        share = share_of(some, self.sequence, self.software)
        outside = [block for block, _ in self.model.kinds if not block.stack]
        split = next((index for index, block in enumerate(self.model.blocks) if block.stack), 0)
        before = [block for block in outside if block in self.model.blocks[:split]]
        after = [block for block in outside if block not in before]
        return Pieces(
            [self.block(block, some, share).take(inverse) for block, _ in self.model.kinds if block.stack],
            self._ends(before, some, share_of_ends(share)).take(inverse),
            self._ends(after, some, share_of_ends(share)).take(inverse),
        )

    def stages(self, layouts: Layouts, pieces: Pieces | None = None) -> Stages:
        """Return the work of one microbatch on each place of the pipeline. `pieces`: of these layouts, if known."""
        kinds, begin, end = pieces or self.pieces(layouts)
        counts = [count for block, count in self.model.kinds if block.stack]
        num_layers = max(sum(counts), 1)
        nothing = begin.times(0.0)
        layer = add(nothing, *(work.times(count / num_layers) for work, count in zip(kinds, counts, strict=True)))
        weight = np.maximum(layer.total, 1e-12)
        dealt = deal(num_layers, layouts, begin.total / weight, end.total / weight)
        first, middle, last, extra = (layer.times(each) for each in dealt)
        if len(kinds) > 1:
            mixture = mix(self.model.layer_order, len(kinds), dealt)
            extra = _mixed(kinds, mixture.layer * dealt.extra[:, None])
            first, middle, last = (_mixed(kinds, each) for each in mixture[:3])
        first = add(first, begin, end.times((layouts.pp == 1).astype(np.float64)))
        return Stages(first, middle, add(last, end), extra, layer, dealt)

    def _ends(self, blocks: list[Block], layouts: Layouts, share: Share) -> Work:
        nothing = Work(*[np.zeros(len(layouts))] * len(Work._fields))
        return add(nothing, *(self.block(block, layouts, share, again=False) for block in blocks))

    def block(self, block: Block, layouts: Layouts, share: Share, *, again: bool = True) -> Work:
        """Return the work of one block; with `again`, including the recomputation that the layouts choose."""
        seconds = self.engine.block(block, share)
        tp_forward, tp_backward = self._tp(block, layouts, share)
        cp = self._cp(block, layouts, share)
        ep_forward, ep_backward = self._ep(block, layouts, share)
        zero = np.zeros(len(layouts))
        rerun, repeated_tp, repeated_ep = zero, zero, zero
        if again:
            full = layouts.recompute == 2
            between = self.software.by_operation
            engine = self.engine
            selective = engine.rerun_between(block, share) if between else engine.rerun(block, share, _SELECTIVE)
            part = layouts.recompute_share
            rerun = part * np.where(full, seconds.forward, np.where(layouts.recompute == 1, selective, 0.0))
            # Outputs of matmuls are saved after their reduction. Under sp, their inputs are gathered again.
            some = (layouts.recompute == 1) & between
            gathered = np.where(some & layouts.sequence_parallel, 0.5 * tp_forward, 0.0)
            repeated_tp = part * np.where(full, tp_forward, gathered)
            repeated_ep = part * np.where(full | some, ep_forward, 0.0)
        return Work(
            forward=seconds.forward + zero,
            input=seconds.input + zero,
            weight=seconds.weight + zero,
            again=rerun + zero,
            tp_forward=tp_forward + zero,
            tp_backward=tp_backward + repeated_tp + zero,
            cp=cp + zero,
            ep=ep_forward + ep_backward + repeated_ep + zero,
            halves=self.engine.halves(block, share, seconds) + zero,
        )

    def _tp(self, block: Block, layouts: Layouts, share: Share) -> tuple[Floats, Floats]:
        """Price tensor parallel reductions: all-reduces, or under sequence parallelism gathers and scatters."""
        group = self.wires.group(layouts.tp, 1)
        num_bytes = np.asarray(share.num_rows(block.rows)) * block.output_elements * share.width
        waits = self.constants.sync_seconds * (layouts.tp > 1)
        reduce = self.wires.all_reduce(num_bytes, group) / self.constants.sync_rate + waits
        gather = self.wires.all_gather(num_bytes, group) / self.constants.sync_rate + waits
        forward = np.where(layouts.sequence_parallel, 2 * gather, reduce) * block.num_reductions
        # In the backward, reductions overlap with weight gradients if the software does so; so do the inputs that
        # sequence parallelism gathers again for these gradients.
        hidden = self.constants.tp_hidden_backward * self.software.async_tp
        backward = forward * (1.0 - hidden)
        exposed = 1.0 - self.constants.tp_hidden * self.software.overlap_tp
        return forward * exposed, backward * exposed

    def _cp(self, block: Block, layouts: Layouts, share: Share) -> Floats:
        """Price the communication of context parallel attention: a ring that overlaps with it, or all-to-alls."""
        total = np.zeros(len(layouts))
        for operation in block.operations:
            if isinstance(operation, Attention):
                exchange = np.where(
                    layouts.context == 1,
                    self._heads_exchanged(operation, layouts, share),
                    self._ring(operation, layouts, share),
                )
                total = total + exchange + self._repeated(operation, layouts, share)
        return total

    def _repeated(self, operation: Attention, layouts: Layouts, share: Share) -> Floats:
        """Return the seconds to repeat keys and values for each query head, in both passes, and to sum their gradients
        in fp32. In a ring, causal queries skip a quarter of the pieces that they receive."""
        if not self.software.repeats_keys or operation.heads == operation.kv_heads:
            return np.zeros(len(layouts))
        per_row = operation.heads * (operation.qk_dim + operation.v_dim)
        rows = np.asarray(share.num_rows(operation.rows), dtype=np.float64) / layouts.tp
        seen = np.where(layouts.context == 1, 1.0, 1.0 + 0.75 * (layouts.cp - 1)) * (layouts.cp > 1)
        return self.engine.stream(seen * rows * per_row * (3 * share.width + 4 + 4))

    def _ring(self, operation: Attention, layouts: Layouts, share: Share) -> Floats:
        """Return the exposed seconds of sending keys and values around the ring, plus the additional seconds of
        attention piece by piece instead of at once."""
        per_row = operation.kv_heads * (operation.qk_dim + operation.v_dim) * share.width
        num_bytes = np.asarray(share.num_rows(operation.rows)) * per_row / layouts.tp
        # A rank waits for its neighbour at every hop, as in a reduction, unless attention takes longer.
        hop = self.wires.hop(num_bytes, layouts.tp, layouts.cp) + self.constants.sync_seconds
        ring = (layouts.cp - 1) * hop
        attention = self.engine.operation(operation, share)
        exposed = np.maximum(ring - attention.forward, 0.0) + np.maximum(2 * ring - attention.input, 0.0)
        # A kernel processes one rank's keys at a time; the fewer keys, the smaller the share of the peak.
        own, ramp = self.sequence / layouts.cp, self.constants.attention_ramp
        slower = (1.0 + ramp / own) / (1.0 + ramp / self.sequence) - 1.0
        shorter = (attention.forward + attention.input) * slower * self.software.is_flash
        return exposed + shorter + (layouts.cp - 1) * self._merged(operation, layouts, share)

    def _merged(self, operation: Attention, layouts: Layouts, share: Share) -> Floats:
        """Return the seconds to add one piece to the result of earlier pieces in fp32: outputs in the forward, and in
        the backward gradients of queries, keys and values. Each sum reads two tensors and writes one."""
        outputs, queries = operation.heads * operation.v_dim, operation.heads * operation.qk_dim
        keys = operation.kv_heads * (operation.qk_dim + operation.v_dim)
        rows = np.asarray(share.num_rows(operation.rows), dtype=np.float64) / layouts.tp
        return self.engine.stream(rows * (outputs + queries + keys) * (share.width + 4 + 4))

    def _heads_exchanged(self, operation: Attention, layouts: Layouts, share: Share) -> Floats:
        """Return the seconds of all-to-alls from split tokens to split heads and back, in both passes, all exposed."""
        heads = operation.heads * (operation.qk_dim + operation.v_dim)
        per_row = (heads + operation.kv_heads * (operation.qk_dim + operation.v_dim)) * share.width
        num_bytes = np.asarray(share.num_rows(operation.rows)) * per_row / layouts.tp
        group = self.wires.group(layouts.cp, layouts.tp)
        waits = 4 * self.constants.sync_seconds * (layouts.cp > 1)
        return 2 * self.wires.all_to_all(num_bytes, group) / self.constants.sync_rate + waits

    def _ep(self, block: Block, layouts: Layouts, share: Share) -> tuple[Floats, Floats]:
        """Return the seconds of sending rows to experts and back, in the forward and in the backward."""
        total = np.zeros(len(layouts))
        fast = self.software.fast_dispatch
        rate = self.constants.fast_dispatch_rate if fast else self.constants.dispatch_rate
        for operation in block.operations:
            if isinstance(operation, Permutation):
                rows = np.asarray(share.num_rows(operation.rows)) / share.outside
                num_bytes = rows * operation.elements * share.width
                group = self.wires.group(layouts.ep, layouts.tp if self.software.cuts_experts else 1)
                exchanged = self.wires.dispatch(num_bytes, operation.top_k, group, once=fast)
                waits = self.constants.sync_seconds * (layouts.ep > 1)
                total = total + exchanged / rate + waits
        exposed = 1.0 - self.constants.ep_hidden * self.software.overlap_experts
        return total * exposed, total * exposed
