"""Seconds and bytes of serving: prefill of a prompt, decoding of many sequences, and the memory for the KV cache.

Decoding reads every weight of a rank and the keys and values of every sequence for each token. It is memory-bound
unless many sequences share the weights. Kernels are assumed to be launched by CUDA graphs, as servers do: one after the
other, with a pause in between that dominates for small models.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from shardwise.cluster.cluster import Pool
from shardwise.cost.collective import Wires
from shardwise.cost.compute import Engine
from shardwise.cost.constants import CONSTANTS, Constants
from shardwise.cost.numbers import Floats, Ints
from shardwise.cost.software import Software
from shardwise.model.model import Block, Model
from shardwise.model.operations import Permutation
from shardwise.model.share import Share

#: Positions of one KV block.
BLOCK = 16
# Share of a device's memory that a server uses. The rest is for memory that it does not count.
_TAKEN = 0.9
# Prompt tokens in one prefill (ours; vLLM's on large GPUs).
_PROMPT_TOKENS = 8192
# Kernels in a graph that choose experts, and as many each to sort rows and to restore them. No CPU waits for counts.
_ROUTING_KERNELS = 4.0
#: Bytes of a quantised weight, including the scales of groups (`kernels/narrow.py`).
WEIGHT_BYTES = {"fp8": 1.0, "int4": 0.5 + 2 * 2 / 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The result for each candidate, as arrays. `tokens_per_second` is for one replica, with prefills in between."""

    first_token: Floats
    each_token: Floats
    tokens_per_second: Floats
    weight_bytes: Floats
    block_bytes: Floats
    num_blocks: Floats
    fits: np.ndarray


def serve(
    model: Model, pool: Pool, *, tp: Ints, pp: Ints, ep: Ints, sequences: Ints, prompt: int, output: int,
    software: Software, constants: Constants = CONSTANTS, width: int = 2, layer_bytes: float | None = None,
) -> Served:  # fmt: skip
    """Price serving `sequences` at once on replicas of tp x pp ranks, with `prompt` tokens in and `output` tokens out.

    Weights, keys and values have `width` bytes; weights of layers have `layer_bytes` if given. A pipeline has as many
    groups of sequences as stages, so that each stage works on a different group. Tensor parallel ranks also cut
    experts.
    """
    of_graphs = replace(software, cuda_graphs=True, routing_kernels=_ROUTING_KERNELS)
    engine = Engine(device=pool.device, software=of_graphs, constants=constants, layer_bytes=layer_bytes)
    wires = Wires(pool=pool)
    together = np.maximum(-(-sequences // pp), 1)
    # Each sequence ends after `output` steps of its group, and a new prompt takes its place.
    coming = together / output
    at_once = np.clip(coming.astype(np.int64), 1, max(_PROMPT_TOKENS // prompt, 1))
    read = _Passes(model, engine, wires, tp=tp, pp=pp, ep=ep, width=width)
    kept = prompt + output / 2
    # Bytes of the KV cache of one position, in all layers, on one tensor parallel rank.
    cache = np.zeros(len(tp)) + model.cache_bytes(Share(tp=tp, width=width))
    reading = together * kept * cache / (pool.device.streaming_bytes_per_second * constants.streaming)
    first = read.forward(prompt, np.ones_like(tp))
    prefill = read.forward(prompt, at_once)
    decode = read.forward(1, together, more=reading)
    # With a group on every stage, a group returns when the slowest stage has processed all groups.
    token = np.maximum(decode.path, np.minimum(pp, sequences) * decode.slowest)
    groups = np.minimum(pp, sequences)
    prompts = pp * prefill.slowest / at_once * _most_that_come(coming, groups)
    held = Share(tp=tp, ep=ep, expert_tp=tp)
    layers, ends = _parameters(model, held, len(tp))
    fullest = _fullest(model, pp)
    weights = (layer_bytes or width) * layers * fullest + width * np.where(pp > 1, ends / 2, ends)
    overhead = constants.context_bytes + constants.workspace_bytes + constants.group_bytes * (tp * pp > 1)
    free = _TAKEN * pool.device.memory_bytes - weights - overhead - _working_bytes(model, prompt, tp)
    block = BLOCK * cache * fullest
    blocks = np.floor(np.maximum(free, 0.0) / np.maximum(block, 1.0))
    needed = np.ceil((prompt + output) / BLOCK) * sequences
    return Served(
        first_token=first.path + token,
        each_token=token,
        tokens_per_second=sequences / (token + prompts),
        weight_bytes=weights,
        block_bytes=block,
        num_blocks=blocks,
        fits=np.asarray((free > 0) & (needed <= blocks)),
    )


def _most_that_come(mean: Floats, groups: Ints) -> Floats:
    """Return the expected maximum of new prompts over groups, if their number in each is Poisson with this mean.

    Groups follow each other through a pipeline, so the group with the most prompts delays all.
    """
    most = int(mean.max() + 10 * np.sqrt(mean.max()) + 10)
    counts = np.arange(most + 1)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(counts[1:]))])
    chance = np.exp(counts * np.log(mean)[:, None] - mean[:, None] - factorials)
    none_above = np.minimum(np.cumsum(chance, axis=1), 1.0) ** groups[:, None]
    return np.asarray(np.where(groups > 1, (1.0 - none_above).sum(axis=1), mean))


def _parameters(model: Model, held: Share, count: int) -> tuple[Floats, Floats]:
    """Return the parameters on a rank with all stages: those of layers, and those of embedding and head."""
    found = {True: np.zeros(count), False: np.zeros(count)}
    for block, times in model.kinds:
        is_layer = bool(block.stack)
        found[is_layer] = found[is_layer] + np.asarray(block.num_parameters_on(held)) * times
    return found[True], found[False]


def _fullest(model: Model, pp: Ints) -> Floats:
    """Return the largest share of all layers on one stage."""
    num_layers = max(model.num_layers, 1)
    return np.asarray(np.ceil(num_layers / pp) / num_layers)


class _Pass(NamedTuple):
    """Seconds of a forward through all stages, and on the slowest stage."""

    path: Floats
    slowest: Floats


@dataclass(frozen=True, slots=True)
class _Passes:
    """Prices forwards of a model on replicas of several layouts."""

    model: Model
    engine: Engine
    wires: Wires
    tp: Ints
    pp: Ints
    ep: Ints
    width: int

    def forward(self, sequence: int, together: Ints, more: Floats | float = 0.0) -> _Pass:
        """Price a forward of `together` sequences of `sequence` tokens. `more`: additional seconds of all layers."""
        share = Share(
            sequence=sequence, microbatch=together, tp=self.tp, ep=self.ep, expert_tp=self.tp, width=self.width
        )
        hop = self.wires.hop(sequence * together * self.model.hidden * self.width / self.tp, self.tp, self.pp)
        seconds = {True: np.zeros(len(self.tp)) + more, False: np.zeros(len(self.tp))}
        for block, count in self.model.kinds:
            is_layer = bool(block.stack)
            seconds[is_layer] = seconds[is_layer] + self._block(block, share) * count
        layers, ends = seconds[True], seconds[False]
        path = layers + ends + hop * (self.pp - 1)
        # Whole layers: either equally many on each stage, or fewer on the last, as many as the head takes the time of.
        num_layers = max(self.model.num_layers, 1)
        layer = layers / num_layers
        even = np.ceil(num_layers / self.pp) * layer + ends
        as_head = np.ceil(ends / np.maximum(layer, 1e-12))
        fewer = np.maximum(np.ceil((num_layers + as_head) / self.pp) * layer, ends)
        return _Pass(path, np.where(self.pp > 1, np.minimum(even, fewer), path))

    def _block(self, block: Block, share: Share) -> Floats:
        """Return the seconds of a block, its tensor parallel reductions, and its all-to-alls of experts."""
        constants = self.engine.constants
        num_bytes = np.asarray(share.num_rows(block.rows)) * block.output_elements * share.width
        summed = self.wires.all_reduce(num_bytes, self.wires.group(self.tp, 1)) * block.num_reductions
        is_one = np.asarray(share.num_rows(1)) == 1
        pause = np.where(is_one, constants.overlapped_seconds, constants.graph_seconds)
        seconds = self.engine.block(block, share).forward + summed + pause * self.engine.num_kernels(block, share)
        experts = self.wires.group(self.ep, self.tp)
        for operation in block.operations:
            if isinstance(operation, Permutation):
                sent = np.asarray(share.num_rows(operation.rows)) * operation.elements * share.width
                seconds = seconds + self.wires.dispatch(sent, operation.top_k, experts, once=False)
        return seconds


def _working_bytes(model: Model, prompt: int, tp: Ints) -> Floats:
    """Return the temporary bytes of a prefill: all tensors of the largest layer."""
    share = Share(sequence=prompt, microbatch=1, tp=tp)
    layers = [np.zeros(len(tp)) + block.saved_bytes(share) for block, _ in model.kinds if block.stack]
    return np.max(layers, axis=0) if layers else np.zeros(len(tp))
