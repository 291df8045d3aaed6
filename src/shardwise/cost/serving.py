"""Seconds and bytes of serving: a prompt's forward, one token of many sequences, and the room for keys and values.

Decoding reads every weight of a rank and the keys and values of every sequence for each token: it is bound by memory,
unless many sequences share the weights. Kernels are taken as launched from graphs, as servers do: one after the other,
with a pause between them that decides where models are small.
"""

from dataclasses import dataclass, replace

import numpy as np

from shardwise.cluster.cluster import Pool
from shardwise.cost.collective import Wires
from shardwise.cost.compute import Engine
from shardwise.cost.constants import CONSTANTS, Constants
from shardwise.cost.numbers import Floats, Ints
from shardwise.cost.software import Software
from shardwise.model.model import Model
from shardwise.model.operations import Permutation
from shardwise.model.share import Share

#: Positions of one block of keys and values.
BLOCK = 16
# Of a device's memory, how much a server takes: the rest is for what it does not count.
_TAKEN = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What each candidate gives: arrays. `tokens_per_second` is of one replica, prompts being read in between."""

    first_token: Floats
    each_token: Floats
    tokens_per_second: Floats
    weight_bytes: Floats
    block_bytes: Floats
    num_blocks: Floats
    fits: np.ndarray


def serve(
    model: Model, pool: Pool, *, tp: Ints, pp: Ints, ep: Ints, sequences: Ints, prompt: int, output: int,
    software: Software, constants: Constants = CONSTANTS, width: int = 2,
) -> Served:  # fmt: skip
    """Price serving `sequences` at once on replicas of tp x pp ranks, prompts of `prompt` tokens, `output` answered.

    Weights, keys and values are numbers of `width` bytes.
    """
    engine = Engine(device=pool.device, software=replace(software, cuda_graphs=True), constants=constants)
    wires = Wires(pool=pool)
    together = np.maximum(-(-sequences // pp), 1)
    read = Share(sequence=prompt, microbatch=1, tp=tp, ep=ep, width=width)
    decode = Share(sequence=1, microbatch=together, tp=tp, ep=ep, width=width)
    hop = wires.hop(together * model.hidden * width / tp, tp, pp) * (pp - 1)
    prompt_hop = wires.hop(prompt * model.hidden * width / tp, tp, pp) * (pp - 1)
    kept = prompt + output / 2
    # Bytes of keys and values of one position, in all layers, on one tensor parallel rank.
    cache = np.zeros(len(tp)) + model.cache_bytes(Share(tp=tp, width=width))
    reading = together * kept * cache / (pool.device.streaming_bytes_per_second * constants.streaming)
    prefill = _forward(model, engine, wires, read, tp, ep) + prompt_hop
    token = _forward(model, engine, wires, decode, tp, ep) + reading + hop
    held = Share(tp=tp, ep=ep)
    parameters = sum((block.num_parameters_on(held) * count for block, count in model.kinds), np.zeros(len(tp)))
    weights = width * parameters / pp
    overhead = constants.context_bytes + constants.workspace_bytes + constants.group_bytes * (tp * pp > 1)
    free = _TAKEN * pool.device.memory_bytes - weights - overhead - _working_bytes(model, prompt, tp)
    block = BLOCK * cache / pp
    blocks = np.floor(np.maximum(free, 0.0) / np.maximum(block, 1.0))
    needed = np.ceil((prompt + output) / BLOCK) * sequences
    # A replica reads a prompt for every answer: all of its stages are busy with it for their part.
    answer = output * token + sequences * prefill / pp
    return Served(
        first_token=prefill + token,
        each_token=token,
        tokens_per_second=sequences * output / answer,
        weight_bytes=weights,
        block_bytes=block,
        num_blocks=blocks,
        fits=np.asarray((free > 0) & (needed <= blocks)),
    )


def _forward(model: Model, engine: Engine, wires: Wires, share: Share, tp: Ints, ep: Ints) -> Floats:
    """Seconds of all blocks, of the sums between tensor parallel ranks, and of rows to their experts and back."""
    total = np.zeros(len(tp))
    group, experts = wires.group(tp, 1), wires.group(ep, tp)
    for block, count in model.kinds:
        num_bytes = np.asarray(share.num_rows(block.rows)) * block.output_elements * share.width
        seconds = engine.block(block, share).forward + wires.all_reduce(num_bytes, group) * block.num_reductions
        is_one = np.asarray(share.num_rows(1)) == 1
        pause = np.where(is_one, engine.constants.overlapped_seconds, engine.constants.graph_seconds)
        seconds = seconds + pause * engine.num_kernels(block, share)
        for operation in block.operations:
            if isinstance(operation, Permutation):
                sent = np.asarray(share.num_rows(operation.rows)) * operation.elements * share.width
                seconds = seconds + wires.dispatch(sent, operation.top_k, experts, once=False)
        total = total + seconds * count
    return total


def _working_bytes(model: Model, prompt: int, tp: Ints) -> Floats:
    """The widest that a layer's tensors are while a prompt is read: what it makes at once, and the last logits."""
    share = Share(sequence=prompt, microbatch=1, tp=tp)
    layers = [np.zeros(len(tp)) + block.saved_bytes(share) for block, _ in model.kinds if block.stack]
    return np.max(layers, axis=0) if layers else np.zeros(len(tp))
